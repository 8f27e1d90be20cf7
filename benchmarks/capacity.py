"""How many GPUs the front end feeds: rising open-loop rates against simulated devices until something is the limit.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.capacity [--simulate h200-8b] [--devices 1,16] [--html FILE]

Each device has an engine of its own with the real scheduler; only its time is simulated. While a rate runs, the queues
are looked at: requests that pile up before the engines say that the front end is the limit, sequences that wait in them
say that the devices are. The generator has the same cores as the server here, and takes its part of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import MODEL, Server
from ftserve.server.bench.arrivals import arrival_times
from ftserve.server.bench.cli import Target
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.observe import ServerUse, scrape
from ftserve.server.bench.report import Run, as_html, sweep_charts
from ftserve.server.bench.results import Slo, summarize
from ftserve.server.bench.workload import Workload, WorkloadConfig

_STEP = 1.6  # between two rates
_KEPT = 0.93  # of the offered rate; less is too little
_GLANCE_S = 0.25
LOADS = {  # model, workload, first rate for each device
    "text": (MODEL, WorkloadConfig(model=MODEL, mix={"text": 1.0}, max_tokens=(16, 16)), 50.0),
    "images": ("tiny-vlm", WorkloadConfig(model="tiny-vlm", mix={"images": 1.0}, max_tokens=(16, 16)), 5.0),
}


@dataclass(slots=True)
class Queues:
    """What waited where, on average, while a rate ran."""

    before_engines: float = 0.0  # requests that the front end has, and the engines have not yet
    engines: float = 0.0  # sequences that no device has room for

    @property
    def limit(self) -> str:
        return "front end" if self.before_engines > self.engines else "devices"


@contextmanager
def watching(port: int) -> Iterator[Queues]:
    """Look at the server's queues every now and then until the block ends."""
    queues, over = Queues(), threading.Event()
    seen: list[tuple[float, float]] = []

    def look() -> None:
        while not over.wait(_GLANCE_S):
            now = scrape("127.0.0.1", port)
            waiting = now.get("ftserve_num_requests_waiting", 0.0)
            in_engines = waiting + now.get("ftserve_num_requests_running", 0.0)
            seen.append((max(0.0, now.get("ftserve_http_requests_inside", 0.0) - in_engines), waiting))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield queues
    finally:
        over.set()
        watcher.join()
        if seen:
            queues.before_engines, queues.engines = (statistics.fmean(column) for column in zip(*seen, strict=True))


def sweep(load: str, profile: str, devices: int, seconds: float) -> list[tuple[Run, Queues]]:
    """Raise the rate until the answers fall behind."""
    model, config, rate = LOADS[load]
    options = ("--engine", "simulated", "--simulate", profile, "--simulate-replicas", str(devices))
    server = Server("-m", "ftserve", *options, "--port", "0", "--no-log-requests", model)
    results: list[tuple[Run, Queues]] = []
    try:
        target = Target(f"http://127.0.0.1:{server.port}", None, server.process.pid)
        items = iter(Workload(config, 0))
        LoadGenerator(target.host, target.port, items, Plan(concurrency=16, max_requests=200)).run()
        rate *= devices**0.5
        while True:
            plan = Plan(arrivals=arrival_times("poisson", rate, rng=random.Random(0)), duration_s=seconds)
            before = target.glance()
            with watching(server.port) as queues:
                records = LoadGenerator(target.host, target.port, items, plan).run()
            use = ServerUse.between(before, target.glance())
            run = Run(f"{rate:.0f} requests/s", rate, records, summarize(records, Slo()), use)
            results.append((run, queues))
            print(row(run, queues), flush=True)
            if run.summary.requests_per_s < _KEPT * len(records) / seconds or run.summary.failures:
                return results
            rate *= _STEP
    finally:
        server.stop()


def row(run: Run, queues: Queues) -> str:
    summary, use = run.summary, run.server
    return (
        f"  offered {run.rate:7.0f}/s  answered {summary.requests_per_s:7.1f}/s  "
        f"devices idle {100 * (use.device_idle_share or 0.0):5.1f} %  server {use.cpu_s / use.seconds:4.2f} cores  "
        f"generator {use.generator_cpu_s / use.seconds:4.2f}  TTFT p50 {summary.ttft_ms.p50:7.1f} ms "
        f"p99 {summary.ttft_ms.p99:7.1f}  waiting: {queues.before_engines:.1f} in the front "
        f"end, {queues.engines:.1f} for devices"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", default="h200-8b")
    parser.add_argument("--devices", default="1,16", help="how many, separated by commas")
    parser.add_argument("--mix", default="text,images", help="which of text and images")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each rate")
    parser.add_argument("--html", type=Path, help="write the plots there")
    options = parser.parse_args()
    pages = []
    for load in options.mix.split(","):
        for devices in map(int, options.devices.split(",")):
            print(f"{load}, {devices} x {options.simulate}:")
            results = sweep(load, options.simulate, devices, options.seconds)
            run, queues = results[-1]
            print(f"  the limit is the {queues.limit}, at {run.summary.requests_per_s:.0f} requests/s\n")
            pages.append((f"{load}, {devices} x {options.simulate}: the {queues.limit}", [run for run, _ in results]))
    if options.html is not None:
        parts = [as_html("Capacity of the front end", vars(options), pages[0][1])]
        parts += [f"<h2>{title}</h2><div class='charts'>{''.join(sweep_charts(runs))}</div>" for title, runs in pages]
        options.html.write_text("".join(parts))


if __name__ == "__main__":
    main()
