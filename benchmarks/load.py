"""A closed-loop load over keep-alive connections on loopback, and what the server's process spent meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import pydoc_data.topics
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MODEL = "smollm2-135m-instruct"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


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
    """Yield excerpts of Python's own manual, which every interpreter carries."""
    text = " ".join(pydoc_data.topics.topics.values()).split()
    for number in range(count):
        start = rng.randrange(len(text) - words)
        yield f"{number} " + " ".join(text[start : start + words])


@dataclass(slots=True)
class Outcome:
    """What the clients saw; times in seconds."""

    wall: float = 0.0
    tokens: int = 0
    chunks: int = 0
    failures: int = 0
    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between chunks of one stream


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int, path: str, outcome: Outcome) -> None:
        self._port, self._path, self._outcome = port, path, outcome

    async def run(self, bodies: Iterator[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        for body in bodies:
            head = f"POST {self._path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            began = time.perf_counter()
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await self._answer(reader, began)
            self._outcome.latencies.append(time.perf_counter() - began)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, began: float) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            self._outcome.failures += 1
        if b"transfer-encoding: chunked" in head:
            await self._events(reader, began)
            return
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        self._count(await reader.readexactly(length))

    async def _events(self, reader: asyncio.StreamReader, began: float) -> None:
        outcome, previous, last = self._outcome, 0.0, b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data = await reader.readexactly(size + 2)
            now = time.perf_counter()
            if previous:
                outcome.gaps.append(now - previous)
            else:
                outcome.first_tokens.append(now - began)
            previous, last = now, last[-2000:] + data  # a chunk may hold several events, the usage in the last ones
            outcome.chunks += 1
        await reader.readexactly(2)
        self._count(last)

    def _count(self, body: bytes) -> None:
        _, found, rest = body.rpartition(b'"completion_tokens":')
        if found:
            self._outcome.tokens += int(rest[: rest.index(b",")])


async def _drive(port: int, path: str, bodies: Sequence[bytes], connections: int) -> Outcome:
    outcome, shared = Outcome(), iter(bodies)
    began = time.perf_counter()
    await asyncio.gather(*(Client(port, path, outcome).run(shared) for _ in range(connections)))
    outcome.wall = time.perf_counter() - began
    return outcome


def drive(port: int, bodies: Sequence[bytes], connections: int, *, path: str = "/v1/chat/completions") -> Outcome:
    """Send every body over `connections` connections, each sending its next when it has its answer."""
    return asyncio.run(_drive(port, path, bodies, connections))


def cpu_by_role(pid: int) -> dict[str, float]:
    """Return the CPU seconds that a process has spent so far, by the role of its threads, from the kernel's books."""
    spent: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, fields = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        role = name.rstrip("0123456789").rstrip("-")
        spent[role] = spent.get(role, 0.0) + (int(fields[11]) + int(fields[12])) * _TICK_S
    return spent


def quantile(values: Sequence[float], q: float) -> float:
    """Return the `q` quantile, or 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


def spread(values: Sequence[float]) -> str:
    """Return the median with the smallest and the largest value."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
