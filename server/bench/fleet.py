"""One load from several processes, for servers that one core cannot load."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

from ftserve.server.bench.arrivals import arrival_times
from ftserve.server.bench.generator import LoadGenerator, Plan, Progress
from ftserve.server.bench.results import Record
from ftserve.server.bench.workload import Item, Workload, WorkloadConfig

_COUNTS = [field.name for field in fields(Progress) if field.name != "elapsed_s"]
_GLANCE_S = 0.25
_START_TIMEOUT_S = 120.0

OnTick = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load as plain values, which can be split and sent to other processes."""

    host: str
    port: int
    workload: WorkloadConfig
    seed: int = 0
    rate: float | None = None  # requests a second of an open loop; None: a closed one
    arrivals: str = "poisson"
    burst_size: int = 10
    concurrency: int = 32
    max_requests: int | None = None
    duration_s: float | None = None
    max_connections: int = 4096
    timeout_s: float = 600.0
    headers: tuple[tuple[str, str], ...] = ()

    def plan(self) -> Plan:
        rng = random.Random(self.seed)
        times = None
        if self.rate is not None:
            times = arrival_times(self.arrivals, self.rate, burst_size=self.burst_size, rng=rng)
        return Plan(
            arrivals=times,
            concurrency=self.concurrency,
            max_requests=self.max_requests,
            duration_s=self.duration_s,
            max_connections=self.max_connections,
            timeout_s=self.timeout_s,
            headers=self.headers,
        )

    def split(self, count: int) -> list[Load]:
        """Return `count` loads that are this one together; Poisson processes add up to one."""
        return [
            replace(
                self,
                seed=self.seed + k * 1_000_003,
                rate=None if self.rate is None else self.rate / count,
                concurrency=max(1, _part(self.concurrency, k, count)),
                max_requests=None if self.max_requests is None else _part(self.max_requests, k, count),
                max_connections=max(1, self.max_connections // count),
            )
            for k in range(count)
        ]


def _part(total: int, index: int, count: int) -> int:
    return total // count + (index < total % count)


def run_load(load: Load, items: Iterator[Item], processes: int, on_tick: OnTick | None) -> list[Record]:
    """Send a load and wait for all answers. `items` are for a single process, which is this one; others make their own.

    Raises:
        RuntimeError: a process has died.
    """
    if processes == 1:
        return LoadGenerator(load.host, load.port, items, load.plan()).run(on_tick)
    context = multiprocessing.get_context("spawn")
    barrier, counts = context.Barrier(processes + 1), context.RawArray("q", processes * len(_COUNTS))
    pipes, workers = [], []
    for index, share in enumerate(load.split(processes)):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(share, index, barrier, counts, sender), daemon=True)
        worker.start()
        sender.close()
        pipes.append(receiver)
        workers.append(worker)
    try:
        barrier.wait(_START_TIMEOUT_S)
        return _collect(pipes, counts, on_tick)
    except (EOFError, OSError) as exc:
        raise RuntimeError("a process of the load generator has died") from exc
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _collect(pipes: list[Pipe], counts: Any, on_tick: OnTick | None) -> list[Record]:
    began, records, open_pipes = time.perf_counter(), list[Record](), list(pipes)
    while open_pipes:
        for pipe in tuple(open_pipes):
            if pipe.poll(_GLANCE_S / len(pipes)):
                records += pipe.recv()
                open_pipes.remove(pipe)
        if on_tick is not None:
            sums = [sum(counts[k :: len(_COUNTS)]) for k in range(len(_COUNTS))]
            on_tick(Progress(time.perf_counter() - began, *sums))
    return sorted(records, key=lambda record: record.intended)


def _work(load: Load, index: int, barrier: Any, counts: Any, results: Pipe) -> None:
    """Run one share; the body of a process. `counts` has a row for each process, written by it alone."""
    start = index * len(_COUNTS)

    def on_tick(now: Progress) -> None:
        counts[start : start + len(_COUNTS)] = [getattr(now, name) for name in _COUNTS]

    generator = LoadGenerator(load.host, load.port, iter(Workload(load.workload, load.seed)), load.plan())
    barrier.wait(_START_TIMEOUT_S)
    results.send(generator.run(on_tick))
    results.close()
