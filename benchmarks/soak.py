"""Run an open loop for minutes, text and images with clients that go away, over a simulated device: nothing may grow.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.soak [--minutes 10] [--rate 20] [--images 0.1]

Fails (exit code 1) if memory grows after warm-up, if a counter of open things is not back at 0, if descriptors are
left, or if a request failed that was not cancelled. Says what garbage collection stopped and for how long.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from benchmarks.servers import Server
from ftserve.server.bench.arrivals import arrival_times
from ftserve.server.bench.cli import Target
from ftserve.server.bench.generator import LoadGenerator, Plan, Progress
from ftserve.server.bench.observe import ServerUse, resident_bytes
from ftserve.server.bench.report import Run, as_text
from ftserve.server.bench.results import Slo, summarize
from ftserve.server.bench.workload import Workload, WorkloadConfig

MODEL = "tiny-vlm"  # takes images and has a small tokenizer; the device that computes it is simulated
_SAMPLE_S = 5.0
_WARM_UP_S = 300.0  # the simulated device's prefix cache alone takes four minutes to fill at the default rate
_FEWEST_SAMPLES = 20
MAX_GROWTH_MB_PER_MINUTE = 3.0  # beyond it is taken for a leak: 1 KB a request shows at 50 requests/s
IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "http_requests_inside", "preprocess_queue_depth")


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope between all pairs (Theil and Sen): single jumps do not move it."""
    slopes = sorted(
        (later - earlier) / (after - before)
        for k, (before, earlier) in enumerate(zip(times, values, strict=True))
        for after, later in list(zip(times, values, strict=True))[k + 1 :]
    )
    return slopes[len(slopes) // 2] if slopes else 0.0


class Memory:
    """Samples the server's resident memory while a load runs."""

    def __init__(self, pid: int) -> None:
        self._pid, self._next = pid, 0.0
        self.times: list[float] = []
        self.megabytes: list[float] = []

    def __call__(self, progress: Progress) -> None:
        if progress.elapsed_s >= self._next:
            self._next = progress.elapsed_s + _SAMPLE_S
            self.times.append(progress.elapsed_s)
            self.megabytes.append(resident_bytes(self._pid) / 1e6)
            sys.stderr.write(
                f"{progress.elapsed_s:6.0f} s  sent {progress.sent}  open {progress.open}  failed {progress.failed}  "
                f"{self.megabytes[-1]:.0f} MB\n"
            )

    def growth_per_minute(self) -> float | None:
        """Return MB a minute after the warm-up; None if the run was too short to tell."""
        start = bisect_left(self.times, _WARM_UP_S)
        if len(self.times) - start < _FEWEST_SAMPLES:
            return None
        return 60 * slope(self.times[start:], self.megabytes[start:])


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def left_over(target: Target, pid: int, descriptors: int) -> list[str]:
    """Return what is still open some seconds after the last client has gone."""
    found: list[str] = []
    for _ in range(50):
        metrics = target.glance().metrics
        found = [f"{name} = {value:g}" for name in IDLE_GAUGES if (value := metrics.get(f"ftserve_{name}", 0.0))]
        if (extra := num_descriptors(pid) - descriptors) > 2:  # the scrape's own
            found.append(f"{extra} descriptors")
        if not found:
            break
        time.sleep(0.2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--images", type=float, default=0.1, help="share of the requests that hold an image")
    options = parser.parse_args()
    config = WorkloadConfig(
        model=MODEL,
        mix={"text": 1 - options.images, "images": options.images},
        prompt_words=(5, 400),
        max_tokens=(1, 100),
        repeat_share=0.5,
        cancel_share=0.2,
        cancel_within_s=1.0,
    )
    server = Server(
        *("-m", "ftserve", "--engine", "simulated", "--port", "0", "--no-log-requests", "--mm-cache-gb", "0.1", MODEL)
    )
    try:
        pid, target = server.process.pid, Target(f"http://127.0.0.1:{server.port}", None, server.process.pid)
        descriptors, before, memory = num_descriptors(pid), target.glance(), Memory(pid)
        arrivals = arrival_times("poisson", options.rate, rng=random.Random(1))
        plan = Plan(arrivals=arrivals, duration_s=60 * options.minutes)
        records = LoadGenerator(target.host, target.port, iter(Workload(config, 1)), plan).run(memory)
        use = ServerUse.between(before, target.glance())
        left = left_over(target, pid, descriptors)
    finally:
        server.stop()
    summary = summarize(records, Slo())
    print(as_text(Run(f"soak, {options.rate:g} requests/s", options.rate, records, summary, use)))
    growth = memory.growth_per_minute()
    judged = "too short a run to judge its growth" if growth is None else f"{growth:+.2f} MB a minute after warm-up"
    print(f"  memory: {memory.megabytes[0]:.0f} MB at first, {memory.megabytes[-1]:.0f} MB at last; {judged}")
    print(f"  left open: {', '.join(left) or 'nothing'}")
    leaks = growth is not None and growth > MAX_GROWTH_MB_PER_MINUTE
    failed = bool(leaks or left or summary.failures)
    print(f"soak: {'FAILED' if failed else 'passed'}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
