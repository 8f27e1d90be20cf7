"""The two sides of a comparison: processes over this checkout and over another one, measured in turn.

Each side has its own `benchmarks.cases`, so that a case follows its commit's interfaces.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]


class MissingCaseError(Exception):
    """The checkout has no such case, or cannot run it."""


def site_of(checkout: Path, into: Path) -> Path:
    """Return a folder from which a checkout's package is imported, whatever is installed."""
    package = into / "ftserve"
    package.mkdir(parents=True)
    for folder in ("engine", "preprocess", "server"):
        (package / folder).symlink_to(checkout / folder)
    for module in (checkout / "server" / "ftserve").iterdir():
        (package / module.name).symlink_to(module)
    return into


def environment(site: Path | None) -> dict[str, str]:
    """Return the environment of a process over `site`, or over what is installed."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("FTSERVE_")}
    ours |= {"PYTHON_GIL": "0", "OMP_NUM_THREADS": "1"}
    return ours if site is None else ours | {"PYTHONPATH": str(site)}


def extract(revision: str, into: Path) -> Path:
    """Write a commit's files into a folder, without touching the repository."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(into, filter="data")
    return into


def base_revision() -> str | None:
    """Return the commit to compare with: where this branch left main, else HEAD under changes, else its parent."""
    head = _git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        base = _git("merge-base", "HEAD", main)
        if base is not None and base != head:
            return base
    return head if _git("status", "--porcelain", "--untracked-files=no") else _git("rev-parse", "HEAD^")


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip() or None


class Side:
    """A process that runs cases over one checkout, one at a time and only when asked."""

    def __init__(self, checkout: Path, site: Path) -> None:
        self._checkout, self._site = checkout, site
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sides"],
            cwd=self._checkout,
            env=environment(self._site),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        self._stop()
        self._process = self._start()

    def cpu_ns(self, case: str, sample_ms: float, *, floor: bool = False) -> float:
        """Return nanoseconds of CPU a unit, from one sample.

        Raises:
            MissingCaseError: this side cannot do it.
        """
        return self._ask(case, {"floor": floor, "ms": sample_ms})

    def held_blocks(self, case: str) -> float:
        """Return how many blocks of memory the result of a call holds, a unit."""
        return self._ask(case, {"held": True})

    def _ask(self, case: str, question: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"case": case, **question}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise MissingCaseError("the process of this side has ended")
        said = json.loads(answer)
        if "error" in said:
            raise MissingCaseError(said["error"])
        return float(said["value"])


def serve() -> None:
    """Answer questions on standard input; the body of a side's process."""
    from benchmarks.cases import CASES

    prepared: dict[str, Any] = {}
    gc.disable()
    for line in sys.stdin:
        question = json.loads(line)
        name = question["case"]
        try:
            if name not in prepared:
                prepared[name] = CASES[name].prepare()
                for function in prepared[name]:
                    _sample(function, 1, 20.0)
            function = prepared[name][bool(question.get("floor"))]
            units = CASES[name].units
            value = _held(function, units) if question.get("held") else _sample(function, units, question["ms"])
            answer: dict[str, object] = {"value": value}
        except Exception as exc:  # noqa: BLE001 - said to the one who asked
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _sample(function: Any, units: int, milliseconds: float) -> float:
    clock, count = time.thread_time_ns, 0
    began = clock()
    until = began + milliseconds * 1e6
    while clock() < until:
        function()
        count += 1
    return (clock() - began) / count / units


def _held(function: Any, units: int, calls: int = 200) -> float:
    results: list[Any] = [None] * calls
    before = sys.getallocatedblocks()
    for k in range(calls):
        results[k] = function()
    held = sys.getallocatedblocks() - before
    del results
    return held / calls / units


@contextlib.contextmanager
def process_cpu(pid: int) -> Iterator[list[float]]:
    """Put the nanoseconds of CPU that a process spends meanwhile, by the scheduler's own count, into the list given."""
    spent: list[float] = []
    before = _scheduled_ns(pid)
    yield spent
    spent.append(_scheduled_ns(pid) - before)


def _scheduled_ns(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total


if __name__ == "__main__":
    serve()
