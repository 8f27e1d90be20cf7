"""How the stages and the whole front end scale with cores, what they wait for, and what follows for larger machines.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.scaling [--cores 1,2,4] [--html FILE]

Efficiency is CPU time per unit on one core by that on k cores: what threads cost each other in caches, atomics and
locks that spin. Other processes of the machine hardly touch it. The share of wall-clock throughput, which they do
touch, is printed beside it, and so is what threads wait for. The server runs over the null engine, pinned to its cores;
the generator has the others, and shares them where there are none.

The projection is one: `cores / (CPU per request * (1 + sigma * (cores - 1)))` with sigma from the measured efficiency
(contention as in Gunther's law, without its quadratic term, which two cores cannot show), cut off where the one engine
thread is busy all the time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import CASES, MODEL, Work
from benchmarks.servers import Server
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.observe import cpu_by_role, role_of
from ftserve.server.bench.plots import Line, line_chart
from ftserve.server.bench.workload import Item, Workload, WorkloadConfig

STAGES = ("parse", "template", "tokenize", "detokenize", "stream", "image")
PROJECTED = (4, 8, 16, 32, 64)
_STAGE_S = 0.5
_LOADS = {"chat, 150 words, 1 token": ("request", 1, 32), "stream, 64 tokens": ("token", 64, 64)}


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement on some cores."""

    cores: int
    cpu_us: float  # a unit
    per_s: float  # units, by the clock


def stage(name: str, threads: int) -> Point:
    """Run a stage on its own objects in each of `threads` threads."""
    barrier, spent, done = threading.Barrier(threads), [0.0] * threads, [0] * threads

    def body(index: int) -> None:
        work: Work = CASES[name].prepare()[0]
        for _ in range(20):
            work()
        barrier.wait()
        until, began, count = time.perf_counter() + _STAGE_S, time.thread_time(), 0
        while time.perf_counter() < until:
            work()
            count += 1
        spent[index], done[index] = time.thread_time() - began, count

    workers = [threading.Thread(target=body, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    units = sum(done) * CASES[name].units
    return Point(threads, 1e6 * sum(spent) / units, units / _STAGE_S)


@dataclass(frozen=True, slots=True)
class Waits:
    """What a role's threads did besides running, a unit of work."""

    queued_us: float  # ready to run, and no core was free
    sleeps: float  # times that a thread went to sleep: a lock, an empty queue, a socket


def _waits(pid: int) -> dict[str, tuple[float, int]]:
    """Return seconds in the run queue and voluntary switches so far, by role."""
    found: dict[str, tuple[float, int]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            role = role_of((task / "comm").read_text().strip())
            queued = int((task / "schedstat").read_text().split()[1]) / 1e9
            status = (task / "status").read_text()
        except OSError:
            continue
        sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        before = found.get(role, (0.0, 0))
        found[role] = (before[0] + queued, before[1] + sleeps)
    return found


@dataclass(frozen=True, slots=True)
class Whole:
    """The server under one load on some cores."""

    point: Point
    cpu_us: dict[str, float]  # by role, a unit
    waits: dict[str, Waits]


def whole(load: str, cores: Sequence[int], requests: int) -> Whole:
    """Load a server that is pinned to `cores`, as fast as it takes it."""
    _, tokens, clients = _LOADS[load]
    options = ("--engine", "null", "--port", "0", "--max-num-seqs", "256", "--no-log-requests")
    server = Server("-m", "ftserve", *options, "--threads", str(max(3, len(cores))), cpus=cores)
    pid, items = server.process.pid, _items(tokens)
    plan = Plan(concurrency=clients, max_requests=requests)
    try:
        LoadGenerator("127.0.0.1", server.port, items, Plan(concurrency=32, max_requests=1500)).run()
        cpu, waits, began = cpu_by_role(pid), _waits(pid), time.perf_counter()
        records = LoadGenerator("127.0.0.1", server.port, items, plan).run()
        seconds, cpu_after, waits_after = time.perf_counter() - began, cpu_by_role(pid), _waits(pid)
    finally:
        server.stop()
    units = tokens * sum(record.is_good for record in records)
    spent = {role: 1e6 * (after - cpu.get(role, 0.0)) / units for role, after in cpu_after.items()}
    waited = {
        role: Waits(
            1e6 * (queued - waits.get(role, (0.0, 0))[0]) / units, (sleeps - waits.get(role, (0.0, 0))[1]) / units
        )
        for role, (queued, sleeps) in waits_after.items()
    }
    return Whole(Point(len(cores), sum(spent.values()), units / seconds), spent, waited)


def _items(tokens: int) -> Iterator[Item]:
    config = WorkloadConfig(model=MODEL, mix={"text": 1.0}, max_tokens=(tokens, tokens), stream=tokens > 1)
    return itertools.cycle(list(itertools.islice(Workload(config, 0), 2000)))


def sigma(points: Sequence[Point]) -> float:
    """Return the share of contention that explains the efficiency on the most cores; 0 if there was none."""
    first, last = points[0], points[-1]
    if last.cores == 1:
        return 0.0
    return max(0.0, (last.cpu_us / first.cpu_us - 1) / (last.cores - 1))


def projection(points: Sequence[Point], engine_us: float, cores: int) -> float:
    """Return units per second that the front end and one engine thread would reach."""
    per_unit = points[0].cpu_us * (1 + sigma(points) * (cores - 1))
    return min(1e6 * cores / per_unit, 1e6 / engine_us)


def _row(name: str, unit: str, points: Sequence[Point]) -> str:
    first = points[0]
    cells = [f"{name:28} {first.cpu_us:9.2f} us a {unit}"]
    cells += [
        f"{p.cores} cores: {100 * first.cpu_us / p.cpu_us:.0f} % by CPU, "
        f"{100 * p.per_s / first.per_s / p.cores:.0f} % by the clock"
        for p in points[1:]
    ]
    return "; ".join(cells)


def _report_whole(load: str, results: Sequence[Whole]) -> str:
    unit = _LOADS[load][0]
    points = [result.point for result in results]
    lines = [_row(load, unit, points)]
    for result in results:
        roles = ", ".join(
            f"{role} {us:.1f} (queued {result.waits[role].queued_us:.1f}, sleeps {result.waits[role].sleeps:.2f})"
            for role, us in sorted(result.cpu_us.items())
            if us >= 0.05
        )
        lines.append(f"    {result.point.cores} cores, us a {unit} (waiting for a core; times asleep): {roles}")
    engine_us = results[-1].cpu_us["engine"]
    lines.append(
        f"    sigma {sigma(points):.3f}, engine thread {engine_us:.1f} us: at most {1e6 / engine_us:,.0f} {unit}s/s"
    )
    projected = ", ".join(f"{n}: {projection(points, engine_us, n):,.0f}" for n in PROJECTED)
    lines.append(f"    PROJECTION, {unit}s/s by cores of the front end: {projected}")
    return "\n".join(lines)


def _chart(load: str, results: Sequence[Whole]) -> str:
    points, engine_us = [result.point for result in results], results[-1].cpu_us["engine"]
    ideal = [1e6 * n / points[0].cpu_us for n in (1, 2, *PROJECTED)]
    projected = [projection(points, engine_us, n) for n in (1, 2, *PROJECTED)]
    axis = [1.0, 2.0, *map(float, PROJECTED)]
    measured = Line("measured", [float(p.cores) for p in points], [p.per_s for p in points])
    lines = [measured, Line("projection", axis, projected), Line("without contention", axis, ideal)]
    return line_chart(load, "cores", f"{_LOADS[load][0]}s/s", lines, log_x=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = sorted(os.sched_getaffinity(0))
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= len(available)]
    parser.add_argument("--cores", type=lambda text: [int(n) for n in text.split(",")], default=counts)
    parser.add_argument("--requests", type=int, default=4000, help="of the one-token load, for each core")
    parser.add_argument("--html", type=Path, help="write the curves there")
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {len(available)} cores. Stages, each thread with its own objects:")
    for name in STAGES:
        print("  " + _row(name, CASES[name].unit, [stage(name, n) for n in options.cores]))
    print("\nThe whole server over the null engine:")
    charts = []
    for load in _LOADS:
        requests = options.requests if _LOADS[load][1] == 1 else options.requests // 8
        results = [whole(load, available[:n], n * requests) for n in options.cores]
        print(_report_whole(load, results))
        charts.append(_chart(load, results))
    if options.html is not None:
        style = "svg{width:560px} text{font:11px sans-serif} .grid{stroke:#ddd}"
        options.html.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(charts)}")


if __name__ == "__main__":
    main()
