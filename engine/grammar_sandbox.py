"""Tries a grammar in a process that may be killed, before this one compiles it.

Compiling takes a millisecond or two, but nothing in llguidance bounds it: `multipleOf: 1000007` takes 9 s, an array of
a million items a gigabyte, and a chain of a few thousand references overflows the stack, which no process survives. A
helper process forks for each grammar; the fork has limits of CPU time, memory and stack, and dies when it needs more.
What passes there passes here, in the same time.

Any thread; one grammar is tried at a time.
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
from pathlib import Path
from typing import Any, NoReturn

from ftserve.engine.errors import EngineError

log = logging.getLogger("ftserve.engine")

CPU_SECONDS = 0.5
_WALL_SECONDS = 5.0  # of a loaded machine, for the same; and of the helper's start
_START_SECONDS = 60.0
_MEMORY_BYTES = 512 * 2**20  # beyond what the helper itself takes
_STACK_BYTES = 2**20  # an eighth of what our threads have: about 200 references in a chain

TOO_COMPLEX = "too large or too complex"
_NO_MORE = 3  # exit code


def make_tokenizer(tokenizer_json: Path, vocab_size: int, eos_ids: list[int]) -> Any:
    """Return llguidance's view of a tokenizer, an `LLTokenizer`; takes a quarter of a second.

    Raises:
        ValueError: llguidance cannot read it.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(str(tokenizer_json), n_vocab=vocab_size, eos_token=eos_ids)


def compile_matcher(tokenizer: Any, source: str) -> Any:
    """Return an `LLMatcher` at the beginning of `source`; whether that is a grammar, its `is_error` tells."""
    from llguidance import LLMatcher, LLParserLimits

    # What one mask may cost: the others of the batch wait for it.
    limits = LLParserLimits(step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def find_error(tokenizer: Any, source: str) -> str:
    """Return llguidance's message if `source` is no grammar or its first mask fails; else nothing."""
    matcher = compile_matcher(tokenizer, source)
    if not matcher.is_error():
        copy = matcher.deep_copy()
        copy.compute_bitmask()
        return str(copy.get_error()) if copy.is_error() else ""
    return str(matcher.get_error())


class GrammarSandbox:
    """The helper process, started when it is first needed."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_ids: list[int]) -> None:
        self._arguments = [str(tokenizer_json), str(vocab_size), *map(str, eos_ids)]
        self._lock = threading.Lock()  # without it two threads would read each other's answers
        self._process: subprocess.Popen[bytes] | None = None

    def find_error(self, source: str) -> str:
        """Return what is wrong with a grammar, or nothing; `TOO_COMPLEX` if the limits do not suffice for it.

        Raises:
            EngineError: the helper process cannot be had.
        """
        with self._lock:
            for _ in range(2):  # it may have died since the last time, which is no grammar's fault
                try:
                    return _ask(self._process or self._start(), source)
                except TimeoutError:
                    self._stop()
                    return TOO_COMPLEX
                except OSError:
                    log.warning("the process that tries grammars has died; it is replaced")
                    self._stop()
        raise EngineError("Grammars cannot be compiled at the moment.")

    def close(self) -> None:
        """End the helper process."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-X", "gil=0", "-m", __name__, *self._arguments]
        if not hasattr(sys, "_is_gil_enabled"):
            del command[1:3]
        # Its own session: a ^C in our terminal is ours, and its fork can be ended with it. It ends with our end of its
        # input, should we be killed.
        self._process = process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
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


def _ask(process: subprocess.Popen[bytes], source: str) -> str:
    assert process.stdin is not None, "made with a pipe"
    process.stdin.write(json.dumps(source).encode() + b"\n")
    process.stdin.flush()
    return str(json.loads(_read_line(process, _WALL_SECONDS)))


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the next line of the process.

    Raises:
        TimeoutError: it takes too long.
        BrokenPipeError: it has ended.
    """
    assert process.stdout is not None, "made with a pipe"
    pipe, line, deadline = process.stdout.fileno(), b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        piece = os.read(pipe, 65536)
        if not piece:
            raise BrokenPipeError
        line += piece
    return line.strip()


def main(tokenizer_json: str, vocab_size: str, *eos_ids: str) -> None:
    """Try the grammars of standard input, a JSON string a line, and answer each with a line."""
    tokenizer = make_tokenizer(Path(tokenizer_json), int(vocab_size), [int(token_id) for token_id in eos_ids])
    find_error(tokenizer, '{"grammars": [{"lark_grammar": "start: /a*/"}]}')  # loads what is loaded late
    threading.stack_size(_STACK_BYTES)
    _say(b"ready")
    while True:
        child = os.fork()  # before there is a grammar: it waits for the next one
        if child == 0:
            _try_next(tokenizer)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == _NO_MORE:
            return
        if code != 0:
            _say(json.dumps(TOO_COMPLEX).encode())


def _try_next(tokenizer: Any) -> NoReturn:
    """Answer one line and end this process."""
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(_NO_MORE)
    _limit_this_process()
    thread = threading.Thread(target=_answer, args=(tokenizer, json.loads(line)))
    thread.start()
    thread.join()
    os._exit(1)  # the thread has ended the process, unless it failed


def _limit_this_process() -> None:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or a hard limit is lower
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _answer(tokenizer: Any, source: str) -> None:
    _say(json.dumps(find_error(tokenizer, source)).encode())
    os._exit(0)


def _say(line: bytes) -> None:
    os.write(1, line + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
