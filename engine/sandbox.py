"""Answers questions in a process that may be killed: what a question costs is bounded in time, memory and stack.

A helper process forks for each question, so that nothing of one is left when the next comes. The fork has limits of
CPU time, memory and stack, and dies when it needs more.

Any thread may ask; one question is answered at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ftserve.engine.errors import EngineError

log = logging.getLogger("ftserve.engine")

_START_SECONDS = 60.0  # of the helper, on a loaded machine
_NO_MORE = 3  # exit code

Answer = Callable[[Any], object]  # both as JSON has them


class SandboxLimitError(Exception):
    """A question needed more than its limits allow."""


class Sandbox:
    """The helper process of one module, started when it is first needed."""

    def __init__(self, module: str, arguments: Sequence[str] = (), *, wall_s: float) -> None:
        """Prepare; `module` is run with `arguments` and calls `serve`. A question takes `wall_s` seconds at most."""
        self._command = [sys.executable, "-X", "gil=0", "-m", module, *arguments]
        if not hasattr(sys, "_is_gil_enabled"):
            del self._command[1:3]
        self._wall_s = wall_s
        self._lock = threading.Lock()  # without it two threads would read each other's answers
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def ask(self, question: object) -> Any:
        """Return the module's answer.

        Raises:
            SandboxLimitError: the limits do not suffice for it.
            EngineError: the helper process cannot be had.
        """
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            # It may have died since the last time, which is no question's fault.
            for _ in range(0 if self._is_closed else 2):
                try:
                    answers = json.loads(_ask(self._process or self._start(), line, self._wall_s))
                except TimeoutError:
                    self._stop()
                    raise SandboxLimitError from None
                except OSError:
                    log.warning("a helper process has died; it is replaced")
                    self._stop()
                else:
                    if not answers:
                        raise SandboxLimitError
                    return answers[0]
        raise EngineError("A helper process of this server cannot be started at the moment.")

    def close(self) -> None:
        """End the helper process; no other is started."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # Its own session: a ^C in our terminal is ours, and its fork can be ended with it. It ends with our end of its
        # input, should we be killed.
        self._process = process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        _read_line(process, _START_SECONDS)
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), process:  # closes the pipes and waits
            pass


def _ask(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    assert process.stdin is not None, "made with a pipe"
    process.stdin.write(line)
    process.stdin.flush()
    return _read_line(process, timeout_s)


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the next line of the process.

    Raises:
        TimeoutError: it takes too long.
        BrokenPipeError: it has ended.
    """
    assert process.stdout is not None, "made with a pipe"
    pipe, pieces, deadline = process.stdout.fileno(), [b""], time.monotonic() + timeout_s
    while not pieces[-1].endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        pieces.append(os.read(pipe, 65536))
        if not pieces[-1]:
            raise BrokenPipeError
    return b"".join(pieces)


def serve(answer: Answer, *, cpu_s: float, memory_bytes: int, stack_bytes: int) -> None:
    """Answer each question of standard input in a fork of its own; `memory_bytes` are beyond what this process has."""
    threading.stack_size(stack_bytes)
    _say([])
    while True:
        child = os.fork()  # before there is a question: it waits for the next one
        if child == 0:
            _answer_next(answer, cpu_s, memory_bytes)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == _NO_MORE:
            return
        if code != 0:
            _say([])


def _answer_next(answer: Answer, cpu_s: float, memory_bytes: int) -> NoReturn:
    """Answer one line and end this process."""
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(_NO_MORE)
    _limit_this_process(cpu_s, memory_bytes)

    def run() -> None:
        _say([answer(json.loads(line))])
        os._exit(0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    os._exit(1)  # the thread has ended the process, unless it failed


def _limit_this_process(cpu_s: float, memory_bytes: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or a hard limit is lower
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _say(answers: list[object]) -> None:
    """Write a line: one answer, or none."""
    line = json.dumps(answers).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]
