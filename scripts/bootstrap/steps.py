"""What every step needs: a line of progress, a log, commands that end when the run does, names taken at once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(
    os.environ.get("FTSERVE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ftserve"
).absolute()

# They would change which interpreter or packages a command sees. PYTHON_GIL=0, which people set to run the server,
# keeps every interpreter that has a GIL from starting.
FOREIGN_VARIABLES = {"CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "PYTHON_GIL", "UV_PYTHON", "VIRTUAL_ENV"}

seconds_taken: dict[str, float] = {}  # by step, in the order in which they ended


class Failure(Exception):  # noqa: N818  # not a bug: its text tells the user what could not be done, and why
    """A step could not be done."""


class Step:
    """Say what is done and about how long it takes, log what its commands print, and time it."""

    def __init__(self, name: str, work: str, usual_time: str) -> None:
        self.name, self.work, self.usual_time = name, work, usual_time
        self.log = CACHE / "logs" / f"{name}.log"

    def __enter__(self) -> Step:
        say(f"{self.name}: {self.work} ({self.usual_time})")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._started = time.monotonic()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            seconds_taken[self.name] = time.monotonic() - self._started
            say(f"{self.name}: done in {duration(seconds_taken[self.name])}")

    def run(self, *command: str | Path, cwd: Path = ROOT, **env: str) -> None:
        """Run a command to its end; raise `Failure` with the last lines of the log if it fails."""
        words = [str(word) for word in command]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            code = _commands.run(words, cwd=cwd, env=_environment(env), stdout=log, stderr=subprocess.STDOUT)
        if code != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise Failure(f"{self.name}: {words[0]} ended with {code}; the last lines of {self.log}:\n{tail}")


class _Commands:
    """The commands that run now.

    Guarantees: after `end_all` each of them is told to end, with all that it started, and none begins; whoever runs
    one gets the cause of that, and so the user the failure that came first.
    Each has a process group of its own for that, so an interrupt from the terminal reaches only this program.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # without it a command could begin between the last look and the end
        self._running: set[subprocess.Popen[bytes]] = set()
        self._cause: BaseException | None = None

    def run(self, words: list[str], **options: object) -> int:
        with self._lock:
            if self._cause:
                raise self._cause
            child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **options)  # type: ignore[call-overload]
            self._running.add(child)
        code: int = child.wait()
        with self._lock:
            self._running.discard(child)
            if self._cause:
                raise self._cause
        return code

    def end_all(self, cause: BaseException) -> None:
        with self._lock:
            self._cause = self._cause or cause
            for child in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)


_commands = _Commands()
end_all = _commands.end_all


def together(jobs: Sequence[Callable[[], object]], at_once: int = 2) -> None:
    """Run jobs side by side; the first that fails ends the others."""
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for job in as_completed([pool.submit(job) for job in jobs]):
                job.result()
        except BaseException as cause:
            end_all(cause)
            raise


def answer(*command: str | Path) -> str | None:
    """Return what a quick command prints, or None where it is missing or fails."""
    words = [str(word) for word in command]
    options = {"cwd": "/", "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 60}
    try:
        return subprocess.check_output(words, env=_environment({}), text=True, **options).strip()  # type: ignore[call-overload, no-any-return]
    except (OSError, subprocess.SubprocessError):
        return None


def _environment(more: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    return {**kept, "FTSERVE_CACHE": str(CACHE), "UV_LINK_MODE": "hardlink", **more}


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Wait until no other run works on the cache or on an environment, and keep others out."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is at work; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Commands that a killed run left behind end soon without their files.
        shutil.rmtree(CACHE / "tmp", ignore_errors=True)
        yield
        shutil.rmtree(CACHE / "tmp", ignore_errors=True)


def workplace(name: str) -> Path:
    """Return a new folder for work in progress; it is cleared away at the end, or by the next run."""
    folder = CACHE / "tmp" / f"{name}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


def publish(made: Path, name: Path) -> None:
    """Give what is whole the name under which it is looked for."""
    name.parent.mkdir(parents=True, exist_ok=True)
    made.rename(name)


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def say(line: str) -> None:
    print(line, flush=True)
