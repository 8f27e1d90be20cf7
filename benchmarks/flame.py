"""Profile a loaded server with Python's own frames in the stacks, by thread role: a flame graph and a table.

    .venv/bin/python -m benchmarks.flame --out DIR [--load "--concurrency 64 --max-tokens 64"] [-- SERVER OPTIONS]

Needs `perf` and the right to use it (kernel.perf_event_paranoid <= 2). What makes it work on free-threaded 3.13, where
py-spy does not: `-X perf_jit` writes unwind information for each Python function; perf unwinds by DWARF, as the
interpreter keeps no frame pointers; and perf is there before the server, for it must see each function's memory mapped.
It slows the server down about twofold, so read shares, not rates.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.stacks import Profile, flame_graph
from ftserve.server.bench.observe import process_tree

DEFAULT_SERVER = ("--engine", "null", "--no-log-requests", "--max-num-seqs", "256")
_START_TIMEOUT_S = 120.0


def record(folder: Path, server: list[str], load: list[str], seconds: float, frequency: int) -> Path:
    """Start a server under perf, load it, and record while the load is steady; return perf's file."""
    control, data = folder / "control", folder / "perf.data"
    os.mkfifo(control)
    perf = ["perf", "record", "-q", "-D", "-1", "--control", f"fifo:{control}", "-F", str(frequency), "-k", "mono"]
    python = [sys.executable, "-X", "gil=0", "-X", "perf_jit", "-m", "ftserve", "--port", "0", *server]
    command = [*perf, "--call-graph", "dwarf,16384", "-o", str(data), "--", *python]
    orders = os.open(control, os.O_RDWR)  # both, so that opening does not wait for perf
    with (folder / "log").open("w") as log:
        recorder = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = _wait_for_url(recorder, folder / "log")
            with _load(url, load):
                time.sleep(2.0)  # until the first requests have been through every stage
                for order in ("enable", "disable"):
                    os.write(orders, f"{order}\n".encode())
                    time.sleep(seconds if order == "enable" else 0.2)
        finally:
            for pid in process_tree(recorder.pid)[1:]:
                os.kill(pid, signal.SIGKILL)
            recorder.wait()
            os.close(orders)
    return data


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"serving .+ at (http://[^ ]+) \(", log.read_text(errors="replace")):
            return found.group(1)
        time.sleep(0.1)
    raise RuntimeError(f"the server does not start:\n{log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def _load(url: str, options: list[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "ftserve", "bench", url, "--duration", "3600", "--quiet", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def resolve(data: Path, folder: Path, *, native: bool) -> Profile:
    """Give the recorded addresses their Python names and read the stacks."""
    named = folder / "named.data"
    subprocess.run(["perf", "inject", "-i", str(data), "--jit", "-o", str(named)], check=True, capture_output=True)
    script = ["perf", "script", "-i", str(named), "-F", "comm,tid,ip,sym,dso"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        return Profile.read(process.stdout, native=native)


def _clean_up(data: Path) -> None:
    """Remove what CPython and perf leave in /tmp, whose place cannot be chosen."""
    listing = subprocess.run(
        ["perf", "script", "-i", str(data), "-F", "pid"], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in {word for word in listing if word.isdigit()}:
        for path in (*Path("/tmp").glob(f"jit-{pid}.dump"), *Path("/tmp").glob(f"jitted-{pid}-*.so")):
            path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for flame.svg, stacks.folded and table.txt")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--frequency", type=int, default=499, help="samples a second and thread")
    parser.add_argument("--load", default="--concurrency 32 --max-tokens 64", help="options of ftserve bench")
    parser.add_argument("--native", action="store_true", help="keep the interpreter's own frames")
    parser.add_argument("server", nargs="*", help=f"after --: options of the server; {' '.join(DEFAULT_SERVER)}")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), options.server or [*DEFAULT_SERVER]
        data = record(folder, server, shlex.split(options.load), options.seconds, options.frequency)
        profile = resolve(data, folder, native=options.native)
        _clean_up(data)
    title = f"ftserve {' '.join(server)}; load: {options.load}"
    (options.out / "flame.svg").write_text(flame_graph(profile, title))
    (options.out / "stacks.folded").write_text(profile.folded())
    (options.out / "table.txt").write_text(profile.table() + "\n")
    print(profile.table())
    for role in profile.categories:
        functions = ", ".join(f"{name} {100 * share:.0f} %" for name, share in profile.hottest(role))
        print(f"\n{role}, with what they call: {functions}")


if __name__ == "__main__":
    main()
