"""The small steps of a request, each on one thread, beside what the bare library takes for the same.

.venv-gil/bin/nox -s micro
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases import CASES


@pytest.mark.parametrize("what", ["ours", "floor"])
@pytest.mark.parametrize("name", CASES)
def test_step(benchmark: BenchmarkFixture, name: str, what: str) -> None:
    case = CASES[name]
    work = case.prepare()[what == "floor"]
    work()
    benchmark.group = f"{name}: {case.units} x {case.unit}; the floor is {case.floor}"
    benchmark(work)
