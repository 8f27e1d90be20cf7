"""What the clients saw, request by request, and its summary. Times are `time.perf_counter()` seconds."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Record:
    """One request. In an open loop `intended` is the moment it was to start, whether or not the generator kept it."""

    kind: str
    intended: float
    sent: float = 0.0  # its first byte
    ended: float = 0.0
    status: int = 0  # 0: no answer
    failure: str = ""  # why it does not count as answered
    is_cancelled: bool = False  # by us
    tokens: int = 0  # as the server counts them, else events with content
    prompt_tokens: int = 0
    content_times: array[float] = field(default_factory=lambda: array("d"))  # of each read that held content

    @property
    def is_good(self) -> bool:
        return not self.failure and not self.is_cancelled

    @property
    def ttft(self) -> float | None:
        return self.content_times[0] - self.intended if self.content_times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        if self.tokens < 2 or not self.content_times:
            return None
        return (self.content_times[-1] - self.content_times[0]) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended - self.intended


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of seconds, shown in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else 0.0
        marks = (quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99, 1.0))
        return cls(len(ordered), *(1e3 * value for value in (mean, *marks)))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the `q` quantile of ascending values, or 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Milliseconds that a good request keeps within; None: whatever."""

    ttft: float | None = None
    itl: float | None = None  # mean gap between the request's tokens
    e2e: float | None = None

    def is_met(self, record: Record) -> bool:
        pairs = ((self.ttft, record.ttft), (self.itl, record.tpot), (self.e2e, record.e2e))
        return record.is_good and all(limit is None or value is None or 1e3 * value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Rates are per second of `wall_s`, from the first intended start to the last end."""

    wall_s: float
    requests: int
    answered: int
    failures: dict[str, int]
    cancelled: int
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    tokens: int
    goodput_per_s: float  # answered requests within the SLO
    slo_share: float
    ttft_ms: Distribution
    itl_ms: Distribution  # gaps between the reads that held content
    tpot_ms: Distribution  # a request's mean time per output token
    e2e_ms: Distribution
    late_start_ms: Distribution  # of the generator itself: first byte behind the intended start
    by_kind: dict[str, dict[str, Distribution]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(records: Sequence[Record], slo: Slo) -> Summary:
    """Sum a run up; at least one record."""
    good = [record for record in records if record.is_good]
    wall = max(record.ended for record in records) - min(record.intended for record in records)
    wall = max(wall, 1e-9)
    tokens, in_slo = sum(record.tokens for record in records), sum(map(slo.is_met, good))
    kinds = sorted({record.kind for record in good})
    return Summary(
        wall_s=wall,
        requests=len(records),
        answered=len(good),
        failures=dict(Counter(record.failure for record in records if record.failure)),
        cancelled=sum(record.is_cancelled for record in records),
        requests_per_s=len(good) / wall,
        tokens_per_s=tokens / wall,
        prompt_tokens_per_s=sum(record.prompt_tokens for record in records) / wall,
        tokens=tokens,
        goodput_per_s=in_slo / wall,
        slo_share=in_slo / max(1, len(records)),
        **_latencies(good),
        late_start_ms=Distribution.of(record.sent - record.intended for record in records if record.sent),
        by_kind={kind: _latencies([r for r in good if r.kind == kind]) for kind in kinds} if len(kinds) > 1 else {},
    )


def _latencies(records: Sequence[Record]) -> dict[str, Distribution]:
    return {
        "ttft_ms": Distribution.of(value for record in records if (value := record.ttft) is not None),
        "itl_ms": Distribution.of(gap for record in records for gap in gaps(record.content_times)),
        "tpot_ms": Distribution.of(value for record in records if (value := record.tpot) is not None),
        "e2e_ms": Distribution.of(record.e2e for record in records),
    }


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def per_second(records: Sequence[Record]) -> Mapping[str, list[float]]:
    """Return, for each second of the run: requests open, requests started, tokens received."""
    start = min(record.intended for record in records)
    length = int(max(record.ended for record in records) - start) + 1
    running, started, tokens = [0.0] * length, [0.0] * length, [0.0] * length
    for record in records:
        began, ended = int(record.intended - start), int(record.ended - start)
        started[began] += 1
        for second in range(began, ended + 1):
            running[second] += 1
        weight = record.tokens / len(record.content_times) if record.content_times else 0.0
        for moment in record.content_times:
            tokens[int(moment - start)] += weight
    return {"running": running, "started": started, "tokens": tokens}
