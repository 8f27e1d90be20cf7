"""Threads against processes at the same core count, in one run: what a request, a token and an image cost each.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_modes

The null engine answers, so this is the front end, and with processes the way to the engine. Each kind of server runs in
turn, round after round; CPU time is that of all its processes, memory the sum of their proportional shares.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import itertools
import json
import os
import random
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.load import MODEL, Scenario, drive, spread
from ftserve.server.config import default_threads

ROOT = Path(__file__).parents[1]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CONNECTIONS = 32
SIDE = 640  # pixels of each image


class Kind(NamedTuple):
    """A way to run the server."""

    name: str
    command: tuple[str, ...]


class Case(NamedTuple):
    """Load, and what its CPU time is divided by."""

    name: str
    model: str
    options: tuple[str, ...]
    bodies: list[bytes]
    units: int


def kinds(front_ends: int) -> list[Kind]:
    threads, processes = ("--front-ends", "0"), ("--front-ends", str(front_ends))
    free = (str(ROOT / ".venv" / "bin" / "python"), "-X", "gil=0", "-m", "ftserve")
    with_gil = (str(ROOT / ".venv-gil" / "bin" / "python"), "-m", "ftserve")
    return [
        Kind("threads, no GIL", free + threads),
        Kind("processes, no GIL", free + processes),
        Kind("processes, GIL", with_gil + processes),
    ]


def cases(scale: float) -> list[Case]:
    def n(count: int) -> int:
        return max(CONNECTIONS, int(count * scale))

    chats = Scenario("", n(2000), CONNECTIONS, 150, 1)
    streams = Scenario("", n(64), CONNECTIONS, 150, 256, stream=True)
    paced = ("--null-step-ms", "8", "--max-num-seqs", "256")
    pictures = list(images(n(192)))
    return [
        Case("request of 150 words", MODEL, (), chats.bodies(1), chats.requests),
        Case("token, a step every 8 ms", MODEL, paced, streams.bodies(2), streams.requests * streams.max_tokens),
        Case(f"image, {SIDE} x {SIDE} JPEG, new", "tiny-vlm", (), pictures, len(pictures)),
        Case("image, the same again", "tiny-vlm", (), pictures[:1] * n(400), n(400)),
    ]


def images(count: int) -> Iterator[bytes]:
    """Yield chats that each show an image of its own."""
    from PIL import Image

    rng = random.Random(3)
    for _ in range(count):
        small = Image.frombytes("RGB", (40, 40), rng.randbytes(40 * 40 * 3))
        file = io.BytesIO()
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG")
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        message = {"role": "user", "content": content}
        yield json.dumps({"model": "tiny-vlm", "messages": [message], "max_tokens": 1}).encode()


@contextlib.contextmanager
def serving(kind: Kind, case: Case, threads: int) -> Iterator[tuple[int, int, float]]:
    """Run a server; give its process id, its port, and the seconds it took to start."""
    began = time.monotonic()
    options = ("--engine", "null", "--threads", str(threads), "--port", "0", "--no-log-requests", *case.options)
    with subprocess.Popen([*kind.command, *options, case.model], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in process.stderr)
            port = int(next(filter(None, lines)).group(1))
            yield process.pid, port, time.monotonic() - began
        finally:
            process.terminate()


def family(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return user and system time of processes so far."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / TICKS_PER_S


def memory_mb(pids: Sequence[int]) -> float:
    """Return what processes hold, in MB; a page that several share counts in parts."""
    texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)[0]) for text in texts) / 1e3


def measure(kind: Kind, case: Case, threads: int, found: dict[tuple[str, str], list[float]]) -> None:
    """Run one case once on a fresh server, and add what was found by row and kind."""
    with serving(kind, case, threads) as (pid, port, start_s):
        pids = family(pid)
        if case.model == MODEL and not case.options:
            found["start, s", kind.name].append(start_s)
            found["memory at start, MB", kind.name].append(memory_mb(pids))
        warm_up = Scenario("", 400, CONNECTIONS, 150, 1).bodies(9) if case.model == MODEL else case.bodies[:1] * 64
        drive(port, warm_up, CONNECTIONS)
        before, began = cpu_seconds(pids), time.monotonic()
        outcome = drive(port, case.bodies, CONNECTIONS)
        assert not outcome.failures, f"{outcome.failures} requests failed"
        found[f"µs of CPU a {case.name}", kind.name].append(1e6 * (cpu_seconds(pids) - before) / case.units)
        found[f"a second: {case.name}", kind.name].append(case.units / (time.monotonic() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument(
        "--front-ends", type=int, default=None, help="processes; if not given, the CPUs that we may use"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests")
    options = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    ways = kinds(options.front_ends or cpus)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    rounds = itertools.product(range(options.rounds), cases(options.scale), ways)
    for _, case, kind in rounds:
        measure(kind, case, options.threads, found)
    print(
        f"{cpus} CPUs, --threads {options.threads}, {options.front_ends or cpus} front ends; median (least to most)\n"
    )
    print("|", " | ".join(["", *(kind.name for kind in ways)]), "|")
    print("|---" * (len(ways) + 1) + "|")
    for row in dict.fromkeys(row for row, _ in found):
        print("|", " | ".join([row, *(spread(found[row, kind.name]) for kind in ways)]), "|")


if __name__ == "__main__":
    main()
