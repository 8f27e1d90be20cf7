"""What a soak takes for growth."""

from __future__ import annotations

import os

import pytest

from benchmarks.soak import Memory, slope


def test_a_single_jump_is_no_growth_and_a_leak_is() -> None:
    times = [float(k) for k in range(60)]
    assert slope(times, [100.0] * 10 + [120.0] * 50) == 0.0
    assert slope(times, [100.0 + 0.5 * t for t in times]) == pytest.approx(0.5)
    assert slope([1.0], [1.0]) == 0.0


def test_a_short_run_is_not_judged() -> None:
    memory = Memory(os.getpid())
    memory.times, memory.megabytes = [0.0, 100.0], [1.0, 2.0]
    assert memory.growth_per_minute() is None
    memory.times = [300.0 + k for k in range(30)]
    memory.megabytes = [float(k) for k in range(30)]
    assert memory.growth_per_minute() == pytest.approx(60.0)
