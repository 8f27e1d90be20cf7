"""A server in a process of its own, as an operator runs it, and what the tests ask of it from outside."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[2]
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")
FRONT_ENDS = int(os.environ.get("SERVER_FRONT_ENDS", "2" if HAS_GIL else "0"))  # 0: the server is one process
NULL_ENGINE = (
    *("--engine", "null", "--threads", "6", "--http-threads", "2", "--output-threads", "2"),
    *("--front-ends", str(FRONT_ENDS)),
)
INTERPRETER = (sys.executable,) if HAS_GIL else (sys.executable, "-X", "gil=0")
COMMAND = (*INTERPRETER, "-m", "ftserve")

START_TIMEOUT_S = 180.0  # generous: a loaded machine is no fault of ours
STOP_TIMEOUT_S = 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def wait_until(is_so: Callable[[], object], what: str, within_s: float = 5.0) -> None:
    """Ask again and again until `is_so`; fails with `what` was waited for after `within_s`."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what would configure a server, plus `extra`."""
    ours = {"PYTHON_GIL", "WEB_CONCURRENCY", "PYTHONWARNINGS"}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("FTSERVE_")}
    return kept | dict(extra or {})


class _Held:
    """A client that is closed when its thread ends."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def __del__(self) -> None:
        self.client.close()


class RunningServer:
    """A started server that answers /ready. Leaving the context stops it, whatever state it is in."""

    def __init__(
        self,
        log_path: Path,
        *arguments: str,
        command: tuple[str, ...] = COMMAND,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        verify: ssl.SSLContext | bool = False,
    ) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(env),
                cwd=cwd,
            )
        try:
            self.url = self._wait_for_line(r"serving .+ at (https?://[^ ]+) \(")
        except BaseException:
            self.kill()
            raise
        self.port = int(self.url.rpartition(":")[2])
        self._verify = verify
        self._own = threading.local()
        wait_until(lambda: self.http.get("/ready").status_code == 200, "ready", START_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self.kill()
        self.http.close()

    @property
    def http(self) -> httpx.Client:
        """Return this thread's client: without a GIL, httpcore's pool now and then mixes up connections of several."""
        held: _Held | None = getattr(self._own, "held", None)
        if held is None:
            client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False, verify=self._verify)
            held = self._own.held = _Held(client)
        return held.client

    def _wait_for_line(self, pattern: str) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(pattern, self.log())) is None:
            assert self.process.poll() is None, f"the server ended while starting:\n{self.log()}"
            assert time.monotonic() < deadline, f"the server does not come up:\n{self.log()}"
            time.sleep(0.02)
        return found.group(1)

    def log(self) -> str:
        """Return what the server has written so far."""
        return self._log_path.read_text(errors="replace")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the process to end and return its exit code."""
        return self.process.wait(within_s)

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = STOP_TIMEOUT_S) -> int:
        """Send a signal, wait for the end, return the exit code."""
        self.send_signal(number)
        return self.wait(within_s)

    def kill(self) -> None:
        if self.is_running():
            self.process.kill()
        self.process.wait()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def chat(self, content: str = "Hello", **fields: object) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=chat_body(content, **fields))

    def complete(self, prompt: object = "Hello", **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json=completion_body(prompt, **fields))

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics, by its name with labels; summed over processes."""
        samples: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                labelled, value = line.rsplit(" ", 1)
                name = re.sub(r',?process="[^"]*"', "", labelled).replace("{}", "")
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def metric(self, name: str) -> float:
        return self.metrics()[f"ftserve_{name}"]

    def is_idle(self) -> bool:
        """Whether no request is left anywhere inside."""
        now = self.metrics()
        gauges = ("num_requests_running", "num_requests_waiting", "http_requests_inside", "preprocess_queue_depth")
        return not any(now[f"ftserve_{name}"] for name in gauges)

    def processes(self) -> dict[str, int]:
        """Return the server's process, as "server", and those that it has started, by name."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
        return {"server": pid, **names}

    def num_fds(self) -> int:
        """Return how many descriptors the server has open."""
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.processes().values())

    def rss(self) -> int:
        """Return the server's resident memory in bytes; what processes share counts once for each."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.processes().values())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Return user and system time of the server so far."""
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.processes().values())
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / TICKS_PER_S


def chat_body(content: str = "Hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 5, **fields}


def completion_body(prompt: object = "Hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 5, **fields}
