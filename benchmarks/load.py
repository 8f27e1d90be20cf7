"""Closed loops of given requests over keep-alive connections on loopback, by the generator of `ftserve bench`."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftserve.server.bench import workload
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.results import Slo, Summary, summarize
from ftserve.server.bench.workload import Item

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Chat requests of one kind."""

    name: str
    requests: int
    connections: int
    words: int  # of real prose in each prompt, all different
    max_tokens: int
    stream: bool = False

    def bodies(self, seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [self._body(text) for text in prose(rng, self.words, self.requests)]

    def _body(self, text: str) -> bytes:
        fields: dict[str, object] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields).encode()


def prose(rng: random.Random, words: int, count: int) -> Iterator[str]:
    """Yield excerpts of Python's own manual."""
    return itertools.islice(workload.prose(rng, (words, words)), count)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients saw."""

    summary: Summary
    chunks: int  # reads that held content

    @property
    def tokens(self) -> int:
        return self.summary.tokens

    @property
    def failures(self) -> int:
        return sum(self.summary.failures.values())


def drive(port: int, bodies: Sequence[bytes], connections: int, *, path: str = "/v1/chat/completions") -> Outcome:
    """Send every body over `connections` connections, each sending its next when it has its answer."""
    items = (Item("text", path, body) for body in bodies)
    plan = Plan(concurrency=connections, max_requests=len(bodies))
    records = LoadGenerator("127.0.0.1", port, items, plan).run()
    return Outcome(summarize(records, Slo()), sum(len(record.content_times) for record in records))


def quantile(values: Sequence[float], q: float) -> float:
    """Return the `q` quantile, or 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


def spread(values: Sequence[float]) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
