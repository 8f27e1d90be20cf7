"""Pass, fail, or too noisy to say: a ratio's confidence interval against a limit."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Verdict(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"  # the noise is too high for this difference; no failure, and said aloud


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval of the median of some ratios."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float], confidence: float) -> Interval:
        """Take order statistics: no assumption on the noise but that samples are independent."""
        ordered, n = sorted(ratios), len(ratios)
        rank, tail = 0, 0.5**n
        while 2 * tail <= 1 - confidence and rank < (n - 1) // 2:
            rank += 1
            tail += math.comb(n, rank) * 0.5**n
        rank = max(0, rank - 1)
        return cls(ordered[rank], ordered[n // 2], ordered[n - 1 - rank])

    def judge(self, limit: float) -> Verdict:
        if self.low > limit:
            return Verdict.FAIL
        return Verdict.PASS if self.high <= limit else Verdict.UNDECIDED


@dataclass(frozen=True, slots=True)
class Rules:
    """How long to look before a case is left undecided."""

    confidence: float
    blocks: int
    max_blocks: int


def decide(
    ratio: Callable[[], float],
    limit: float,
    rules: Rules,
    *,
    in_time: Callable[[], bool] = lambda: True,
    start_anew: Callable[[], None] = lambda: None,
) -> tuple[Interval, Verdict]:
    """Judge `ratio`, which measures anew each time, against `limit`.

    More samples are taken while it is undecided. A failure is measured a second time after `start_anew`, and is one
    only if that fails too: over many cases and runs, what happens once in fifty happens every day, and where a process
    happens to lie in memory makes a few percent.
    """
    interval, verdict = _look(ratio, limit, rules, in_time)
    if verdict is Verdict.FAIL:
        start_anew()
        again, second = _look(ratio, limit, rules, in_time)
        return (again, second) if second is Verdict.FAIL else (again, Verdict.UNDECIDED)
    return interval, verdict


def _look(
    ratio: Callable[[], float], limit: float, rules: Rules, in_time: Callable[[], bool]
) -> tuple[Interval, Verdict]:
    ratios = [ratio() for _ in range(rules.blocks)]
    while True:
        interval = Interval.of(ratios, rules.confidence)
        verdict = interval.judge(limit)
        if verdict is not Verdict.UNDECIDED or len(ratios) >= rules.max_blocks or not in_time():
            return interval, verdict
        ratios += [ratio() for _ in range(rules.blocks)]
