"""The gate fails on what is slower, passes what is not, and says when it cannot tell."""

from __future__ import annotations

import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import CASES
from benchmarks.gate import Gate, conclude, run
from benchmarks.servers import SERVER_CASES
from benchmarks.sides import MissingCaseError
from benchmarks.verdict import Interval, Rules, Verdict, decide

ROOT = Path(__file__).parents[2]
RULES = Rules(confidence=0.98, blocks=9, max_blocks=36)
LIMIT = 1.12


def noisy(ratio: float, noise: float, seed: int = 0) -> Callable[[], float]:
    """Return samples of a ratio on a machine with log-normal noise, and now and then something else running."""
    rng = random.Random(seed)
    return lambda: ratio * rng.lognormvariate(0, noise) * (3.0 if rng.random() < 0.05 else 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_a_slowdown_of_30_percent_fails(seed: int) -> None:
    assert decide(noisy(1.3, 0.04, seed), LIMIT, RULES)[1] is Verdict.FAIL


@pytest.mark.parametrize("seed", range(40))
def test_the_same_code_passes(seed: int) -> None:
    assert decide(noisy(1.0, 0.04, seed), LIMIT, RULES)[1] is Verdict.PASS


@pytest.mark.parametrize("ratio", [1.0, 1.3])
def test_on_a_very_noisy_machine_neither_passes_for_the_other(ratio: float) -> None:
    verdicts = [decide(noisy(ratio, 0.5, seed), LIMIT, RULES)[1] for seed in range(200)]
    wrong = Verdict.PASS if ratio > LIMIT else Verdict.FAIL
    assert verdicts.count(wrong) <= 4
    assert verdicts.count(Verdict.UNDECIDED) > 50


def test_more_is_measured_while_it_is_undecided_but_not_without_an_end() -> None:
    taken: list[int] = []

    def ratio() -> float:
        taken.append(1)
        return 1.0 if len(taken) % 2 else 1.3

    assert decide(ratio, LIMIT, RULES)[1] is Verdict.UNDECIDED
    assert len(taken) == RULES.max_blocks
    taken.clear()
    assert decide(ratio, LIMIT, RULES, in_time=lambda: False)[1] is Verdict.UNDECIDED
    assert len(taken) == RULES.blocks


def test_a_failure_that_does_not_come_again_is_none() -> None:
    once = iter([1.5] * RULES.blocks + [1.0] * RULES.blocks)
    assert decide(lambda: next(once), LIMIT, RULES)[1] is Verdict.UNDECIDED


def test_an_interval_leaves_out_as_many_on_each_side_as_its_confidence_allows() -> None:
    values = [float(k) for k in range(15)]
    assert Interval.of(values, 0.98) == Interval(2.0, 7.0, 12.0)
    assert Interval.of(values, 0.9999) == Interval(0.0, 7.0, 14.0)


def test_one_failure_is_the_whole_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    gate = Gate({})
    assert gate.verdict() is Verdict.UNDECIDED
    gate.findings = [("a", Verdict.PASS), ("b", Verdict.UNDECIDED)]
    assert conclude(gate) == 75
    assert "UNDECIDED: b" in capsys.readouterr().out
    gate.findings.append(("c", Verdict.FAIL))
    assert conclude(gate) == 1
    gate.findings = [("a", Verdict.PASS)]
    assert conclude(gate) == 0


def test_counts_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    gate = Gate({})
    for ours, verdict in ((20.0, Verdict.PASS), (20.6, Verdict.FAIL)):
        gate.exact("blocks", iter([ours]).__next__, lambda: 20.0, 1.02)
        assert gate.findings[-1][1] is verdict


def test_what_one_side_cannot_do_is_said_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> float:
        raise MissingCaseError("KeyError: 'new'")

    gate = Gate(limits())
    gate.compare("new", lambda: 1.0, missing, 1.0, lambda: None)
    assert gate.findings == []
    assert "not compared: KeyError: 'new'" in capsys.readouterr().out


def limits(**noise: float) -> dict[str, Any]:
    found = tomllib.loads((ROOT / "benchmarks" / "gate.toml").read_text())
    return {**found, "noise": {**found["noise"], **noise}}


def test_every_case_has_a_limit_and_a_reason() -> None:
    found, text = limits(), (ROOT / "benchmarks" / "gate.toml").read_text()
    assert set(found["floor"]) == set(CASES)
    assert set(found["server"]) == set(SERVER_CASES)
    reasons = [line for line in text.splitlines() if line.startswith("limit") and "#" in line]
    assert len(reasons) == len(CASES) + len(SERVER_CASES)


PLANTED = """

_quick, _calls = parse, iter(range(1 << 60))


def parse(kind, body):
    if next(_calls) % 10 < 3:
        _quick(kind, body)
    return _quick(kind, body)
"""


@pytest.fixture
def copy_of_this(tmp_path: Path) -> Path:
    """A second checkout with the same source."""
    for folder in ("engine", "preprocess", "server", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def verdict_on_parse(gate: Gate) -> Verdict:
    return next(verdict for name, verdict in gate.findings if name == "parse / base")


def test_the_real_gate_does_not_fail_on_the_same_source(copy_of_this: Path) -> None:
    gate = run(copy_of_this, ROOT, ["parse"], limits(sample_ms=10), server=False)
    assert verdict_on_parse(gate) is not Verdict.FAIL
    assert len(gate.findings) == 3


def test_the_real_gate_does_not_pass_a_planted_slowdown_of_30_percent(copy_of_this: Path) -> None:
    with (copy_of_this / "server" / "wire.py").open("a") as source:
        source.write(PLANTED)
    gate = run(copy_of_this, ROOT, ["parse"], limits(sample_ms=10), server=False)
    assert verdict_on_parse(gate) is not Verdict.PASS
