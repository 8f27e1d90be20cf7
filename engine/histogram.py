"""A histogram with one writer, for paths where a lock per observation would be shared between threads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts by upper bound. One thread observes; any thread may read counts that are one observation old."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # ascending upper bounds, inclusive, in the observed unit
        self.counts = [0] * (len(self.bounds) + 1)  # the last one holds what exceeds every bound
        self.total = 0.0

    @classmethod
    def exponential(cls, start: float, factor: float, count: int) -> Histogram:
        """Return a histogram whose bounds are `start * factor**k`."""
        return cls([start * factor**k for k in range(count)])

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @classmethod
    def sum(cls, parts: Iterable[Histogram]) -> Histogram:
        """Return the sum of histograms with the same bounds. Any thread."""
        parts = list(parts)
        result = cls(parts[0].bounds)
        for part in parts:
            result.counts = [a + b for a, b in zip(result.counts, part.counts, strict=True)]
            result.total += part.total
        return result
