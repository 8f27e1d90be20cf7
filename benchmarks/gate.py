"""Tell whether this checkout costs more than the commit it grew from, or more than it may beside bare libraries.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.gate [--base REVISION] [--cases NAME,NAME] [--no-server]

CPU time and memory blocks, never wall time; everything is a ratio from one run, measured in turn (A-B-B-A), so that a
busy machine widens the interval and does not move it. `gate.toml` has the limits and their reasons. Exit code 0: pass,
1: fail, 75: undecided, which is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.servers import SERVER_CASES, Servers
from benchmarks.sides import ROOT, MissingCaseError, Side, base_revision, extract, site_of
from benchmarks.verdict import Rules, Verdict, decide

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNDECIDED: 75}


@dataclass(slots=True)
class Gate:
    """One run: what it allows, and what it has found."""

    limits: dict[str, Any]
    findings: list[tuple[str, Verdict]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def rules(self) -> Rules:
        noise = self.limits["noise"]
        return Rules(noise["confidence"], noise["blocks"], noise["max_blocks"])

    def in_time(self) -> bool:
        return time.monotonic() - self.began < float(self.limits["noise"]["budget_s"])

    def compare(
        self, name: str, a: Callable[[], float], b: Callable[[], float], limit: float, start_anew: Callable[[], None]
    ) -> None:
        """Judge a / b, each a cost, in blocks of A-B-B-A."""

        def ratio() -> float:
            first, second, third, fourth = a(), b(), b(), a()
            return (first + fourth) / (second + third)

        try:
            interval, verdict = decide(ratio, limit, self.rules, in_time=self.in_time, start_anew=start_anew)
        except MissingCaseError as exc:
            say(f"{name:38} not compared: {exc}")
            return
        say(
            f"{name:38} {interval.median:7.3f} ({interval.low:.3f} to {interval.high:.3f}), "
            f"limit {limit:g}: {verdict.value}"
        )
        self.findings.append((name, verdict))

    def exact(self, name: str, a: Callable[[], float], b: Callable[[], float], limit: float) -> None:
        """Judge two counts that have no noise; half a unit more is always allowed."""
        try:
            ours, theirs = a(), b()
        except MissingCaseError as exc:
            say(f"{name:38} not compared: {exc}")
            return
        verdict = Verdict.PASS if ours <= max(theirs * limit, theirs + 0.5) else Verdict.FAIL
        if verdict is Verdict.FAIL or ours >= 0.5:
            say(f"{name:38} {ours:7.1f} after {theirs:.1f}, limit {limit:g} times: {verdict.value}")
        self.findings.append((name, verdict))

    def verdict(self) -> Verdict:
        """Return the worst of all findings; with nothing compared nothing is known."""
        verdicts = [verdict for _, verdict in self.findings]
        for worst in (Verdict.FAIL, Verdict.UNDECIDED):
            if worst in verdicts:
                return worst
        return Verdict.PASS if verdicts else Verdict.UNDECIDED


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def compare_cases(gate: Gate, names: Sequence[str], head: Side, base: Side | None) -> None:
    """Judge the small cases against their floors and the base."""
    ms, limits = gate.limits["noise"]["sample_ms"], gate.limits

    def start_anew() -> None:
        for side in (head, base):
            if side is not None:
                side.restart()

    for name in names:
        ours = partial(head.cpu_ns, name, ms)
        floor = partial(head.cpu_ns, name, ms, floor=True)
        gate.compare(f"{name} / {CASES[name].floor}", ours, floor, limits["floor"][name]["limit"], start_anew)
        if base is None:
            continue
        gate.compare(f"{name} / base", ours, partial(base.cpu_ns, name, ms), limits["base"]["limit"], start_anew)
        if CASES[name].holds:
            held, held_then = partial(head.held_blocks, name), partial(base.held_blocks, name)
            gate.exact(f"{name}, blocks held / base", held, held_then, limits["base"]["held_limit"])


def compare_servers(gate: Gate, servers: Servers) -> None:
    """Judge a whole server over the null engine against an empty handler and the base's server."""
    for name in SERVER_CASES:
        ours, empty = servers.cost("head", name), servers.cost("echo", "echo")
        limit = gate.limits["server"][name]["limit"]
        gate.compare(f"server, {name} / empty handler", ours, empty, limit, servers.restart)
        if "base" in servers.running:
            base, limit = servers.cost("base", name), gate.limits["base"]["limit"]
            gate.compare(f"server, {name} / base", ours, base, limit, servers.restart)


def run(checkout: Path, base: Path | None, names: Sequence[str], limits: dict[str, Any], *, server: bool) -> Gate:
    """Compare a checkout with its floors and, if given, with another checkout."""
    gate = Gate(limits)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sites = {"head": site_of(checkout, folder / "head")}
        checkouts = {"head": checkout}
        if base is not None:
            sites["base"], checkouts["base"] = site_of(base, folder / "base"), base
        sides = {name: stack.enter_context(Side(checkouts[name], sites[name])) for name in sites}
        compare_cases(gate, names, sides["head"], sides.get("base"))
        if server:
            compare_servers(gate, stack.enter_context(Servers(checkouts, sites)))
    return gate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit to compare with; 'none': only with floors")
    parser.add_argument("--cases", default=",".join(CASES), help="which of the small cases")
    parser.add_argument("--no-server", action="store_true", help="leave the whole server out")
    options = parser.parse_args(arguments)
    limits = tomllib.loads((ROOT / "benchmarks" / "gate.toml").read_text())
    revision = options.base or base_revision() or "none"
    say(f"gate: CPU time beside bare libraries and beside {revision[:12]}; median (interval) of ratios")
    with contextlib.ExitStack() as stack:
        base = None
        if revision != "none":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            base = extract(revision, Path(folder))
        names = [name for name in options.cases.split(",") if name]
        gate = run(ROOT, base, names, limits, server=not options.no_server)
    return conclude(gate)


def conclude(gate: Gate) -> int:
    """Say the verdict and return its exit code."""
    verdict = gate.verdict()
    for kind in (Verdict.FAIL, Verdict.UNDECIDED):
        if names := [name for name, found in gate.findings if found is kind]:
            say(f"{kind.value.upper()}: {', '.join(names)}")
    seconds = time.monotonic() - gate.began
    note = "; the machine is too noisy to say more, which is no failure" if verdict is Verdict.UNDECIDED else ""
    say(f"gate: {verdict.value} after {seconds:.0f} s, {len(gate.findings)} comparisons{note}")
    return EXIT_CODES[verdict]


if __name__ == "__main__":
    raise SystemExit(main())
