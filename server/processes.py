"""The server as processes: one engine, several front ends, and this one, which starts, watches and ends them.

Guarantees:
    - Nothing outlives this process: the kernel ends the others with it, however it ends.
    - A process that ends is replaced, after a pause that grows while it does not live long. An engine's requests end
      with an error; a front end's are cancelled in the engine, and the other front ends do not notice.
    - What the processes share lies in one private folder, a part for each; the part goes when its process does. A
      folder that a killed supervisor left behind is removed by the next one that starts.

Assumptions: this process has one thread, so that it may fork at any time. It holds no model and no library that
starts threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ftserve.engine.errors import EngineDeadError, FtserveError
from ftserve.server.config import ServerConfig
from ftserve.server.control import Channel, die_with
from ftserve.server.engine_process import run_engine
from ftserve.server.folders import make_folder, sweep
from ftserve.server.front_process import FrontProcess, Place
from ftserve.server.http import bind
from ftserve.server.responses_shared import create
from ftserve.server.service import check_environment

log = logging.getLogger("ftserve")

ENGINE = -1  # the slot of the engine
STEADY_S = 30.0  # a process that lived so long is replaced at once
_MAX_PAUSE_S = 30.0
_GATHER_TIMEOUT_S = 1.0
_END_GRACE_S = 8.0  # beyond the deadline of the shutdown, until what is left is killed


@dataclass(slots=True)
class Child:
    """A process of ours."""

    slot: int
    number: int  # none before it had the same
    pid: int
    channel: Channel
    folder: Path
    started: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    has_drained: bool = False
    failure: str = ""  # what it said before it ended

    @property
    def role(self) -> str:
        return "engine" if self.slot == ENGINE else f"front end {self.slot}"


@dataclass(slots=True)
class Gathered:
    """Reports that are being gathered for one front end."""

    asker: Child
    asked_id: int
    waiting: set[int]  # numbers of the front ends that have not answered
    deadline: float


class Supervisor:
    """Runs a server until a signal ends it."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._children: dict[int, Child] = {}  # by slot
        self._next_number = 1
        self._due: dict[int, float] = {}  # by slot: when to start the next one
        self._failures: dict[int, int] = {}  # by slot: how many in a row did not live long
        self._engine: Mapping[str, Any] | None = None  # what front ends are told of a listening engine
        self._gathered: dict[int, Gathered] = {}
        self._num_gathered = 0
        self._has_served = False
        self._exit_code = 0
        self._end_by = 0.0  # time.monotonic(); set once it stops
        self._num_signals = 0
        self._listener: socket.socket | None = None
        self._folder = Path()

    def run(self) -> int:
        """Serve, and return the exit code."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            check_environment(needs_threads=False)
            self._listener = bind(self._config)
            if self._config.uds is None:  # known to be ours alone now; the front ends share it
                self._config = replace(self._config, port=self._listener.getsockname()[1])
                self._listener.close()
                self._listener = bind(self._config, is_shared=True)
            sweep()
            self._folder = make_folder()
            create(self._folder)
        except (OSError, RuntimeError, sqlite3.Error) as exc:
            return _say(str(exc))
        try:
            self._start(ENGINE)
            while self._children or self._due:
                self._wait(wake)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._exit_code

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._num_signals += 1

    def _wait(self, wake: socket.socket) -> None:
        """Wait until something happens, and see to it."""
        by_descriptor = {child.channel.fileno(): child for child in self._children.values()}
        readable, _, _ = select.select([wake.fileno(), *by_descriptor], [], [], self._patience())
        if wake.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                wake.recv(4096)
        for descriptor in readable:
            if (child := by_descriptor.get(descriptor)) is not None:
                self._hear(child)
        if self._num_signals and not self._end_by:
            self._begin_to_stop()
        if self._num_signals > 1:
            self._tell_front_ends("abort")
            self._end_by = min(self._end_by, time.monotonic() + _END_GRACE_S)
            self._num_signals = 1
        self._do_what_is_due()

    def _patience(self) -> float | None:
        """Return the seconds until something is due."""
        times = [*self._due.values(), *(gathered.deadline for gathered in self._gathered.values())]
        if self._end_by:
            times.append(self._end_by)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for slot in [slot for slot, due in self._due.items() if due <= now]:
            del self._due[slot]
            self._start(slot)
        for number in [number for number, gathered in self._gathered.items() if gathered.deadline <= now]:
            self._end_gathering(number)
        if self._end_by and now >= self._end_by:
            for child in self._children.values():
                log.warning("%s does not end, and is killed", child.role)
                os.kill(child.pid, signal.SIGKILL)
            self._end_by = now + _END_GRACE_S

    def _start(self, slot: int) -> None:
        """Start a process: fork, and do there what its role is."""
        number, self._next_number = self._next_number, self._next_number + 1
        folder = self._folder / f"{'engine' if slot == ENGINE else 'front'}-{number}"
        folder.mkdir(mode=0o700)
        ours, theirs = Channel.pair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(ours, parent)
            child_folder = folder
            if slot == ENGINE:
                _live(theirs, lambda: run_engine(self._config, number, child_folder, theirs))
            listener = self._listener if self._config.uds is not None else None
            place = Place(slot, number, folder, listener)
            _live(theirs, lambda: FrontProcess(self._config.of_front_end(), place, theirs).run())
        theirs.close()
        child = self._children[slot] = Child(slot, number, pid, ours, folder)
        if slot != ENGINE and self._engine is not None:
            child.channel.send("engine", **self._engine)

    def _become_child(self, channel: Channel, parent: int) -> None:
        """Drop what is the supervisor's. Signals reach us all, from a terminal; it alone acts on them."""
        die_with(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        channel.close()
        for child in self._children.values():
            child.channel.close()
        if self._config.uds is None and self._listener is not None:
            self._listener.close()

    def _hear(self, child: Child) -> None:
        while message := child.channel.receive():
            self._obey(child, message)
        if message is None:
            self._bury(child)

    def _obey(self, child: Child, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "listening":
            self._introduce(child, message["endpoint"])
        elif kind == "ready":
            self._note_ready(child, message["lines"])
        elif kind == "gather":
            self._gather(child, message["id"])
        elif kind == "reported":
            self._pass_on(child, message)
        elif kind == "drained":
            child.has_drained = True
            self._end_if_drained()
        elif kind == "failed":
            child.failure = message["reason"]
        elif kind == "stalled":
            self._kill_link(message["link"])
        elif kind == "abort response":  # the front end that makes it knows it
            self._tell_front_ends(kind, response_id=message["response_id"])

    def _introduce(self, engine: Child, endpoint: str) -> None:
        """Tell the front ends of an engine that listens; start them, the first time."""
        self._engine = {"number": engine.number, "endpoint": endpoint}
        self._tell_front_ends("engine", **self._engine)
        if not self._has_served and not self._end_by:
            for slot in range(self._config.front_ends):
                if slot not in self._children and slot not in self._due:
                    self._start(slot)

    def _note_ready(self, child: Child, lines: list[str]) -> None:
        child.is_ready = True
        fronts = self._front_ends()
        if not self._has_served and len(fronts) == self._config.front_ends and all(one.is_ready for one in fronts):
            self._has_served = True
            logging.getLogger("ftserve.start").info("%s", lines[0])
            for line in lines[1:]:
                log.info("%s", line)

    def _kill_link(self, link: int) -> None:
        for child in self._front_ends():
            if child.number == link:
                log.error("%s takes no events, and is killed", child.role)
                os.kill(child.pid, signal.SIGKILL)

    def _bury(self, child: Child) -> None:
        """See to all that the end of a process leaves to do."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)  # its channel has ended, so it has, or is of no use any more
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        child.channel.close()
        del self._children[child.slot]
        shutil.rmtree(child.folder, ignore_errors=True)
        for number in [number for number, one in self._gathered.items() if child.number in one.waiting]:
            self._forget_report(number, child.number)
        reason = child.failure or f"its process ended with {code}"
        if child.slot == ENGINE:
            self._engine = None
            self._tell_front_ends("engine lost", reason="its process ended")
        elif engine := self._children.get(ENGINE):
            engine.channel.send("front end lost", link=child.number)
        if self._end_by:
            self._go_on_stopping()
        else:
            self._replace(child, reason)

    def _replace(self, child: Child, reason: str) -> None:
        if not self._has_served:
            self._exit_code = _say(reason)
            self._begin_to_stop()
            return
        if child.slot == ENGINE and self._config.on_engine_failure == "exit":
            log.error("ending the server, since its engine has failed: %s", reason)
            self._exit_code = 1
            self._begin_to_stop()
            return
        lived = time.monotonic() - child.started
        count = self._failures[child.slot] = 0 if lived > STEADY_S else self._failures.get(child.slot, 0) + 1
        pause = min(_MAX_PAUSE_S, 0.1 * 2**count) if count > 1 else 0.0
        log.error("%s has ended (%s); another one starts in %.1f s", child.role, reason, pause)
        self._due[child.slot] = time.monotonic() + pause

    def _begin_to_stop(self) -> None:
        self._due.clear()
        self._end_by = time.monotonic() + self._config.shutdown_timeout_s + _END_GRACE_S
        self._tell_front_ends("drain")
        self._go_on_stopping()

    def _end_if_drained(self) -> None:
        """End the front ends once none of them has anything left: until then each refuses what comes, in time."""
        if self._end_by and all(child.has_drained for child in self._front_ends()):
            self._tell_front_ends("end")

    def _go_on_stopping(self) -> None:
        if self._front_ends():
            self._end_if_drained()
        elif engine := self._children.get(ENGINE):
            engine.channel.send("stop")

    def _front_ends(self) -> list[Child]:
        return [child for child in self._children.values() if child.slot != ENGINE]

    def _tell_front_ends(self, kind: str, **fields: object) -> None:
        for child in self._front_ends():
            child.channel.send(kind, **fields)

    def _gather(self, asker: Child, asked_id: int) -> None:
        self._num_gathered += 1
        number, asked = self._num_gathered, [child for child in self._front_ends() if child.is_ready or child is asker]
        deadline = time.monotonic() + _GATHER_TIMEOUT_S
        self._gathered[number] = Gathered(asker, asked_id, {child.number for child in asked}, deadline)
        for child in asked:
            if not child.channel.send("report", id=number):
                self._forget_report(number, child.number)

    def _pass_on(self, child: Child, message: Mapping[str, Any]) -> None:
        gathered = self._gathered.get(message["id"])
        if gathered is not None:
            report = {**message["report"], "process": f"front-{child.slot}"}
            gathered.asker.channel.send("reported", id=gathered.asked_id, report=report)
            self._forget_report(message["id"], child.number)

    def _forget_report(self, number: int, child_number: int) -> None:
        self._gathered[number].waiting.discard(child_number)
        if not self._gathered[number].waiting:
            self._end_gathering(number)

    def _end_gathering(self, number: int) -> None:
        gathered = self._gathered.pop(number)
        gathered.asker.channel.send("reported", id=gathered.asked_id)


def _live(channel: Channel, work: Callable[[], None]) -> NoReturn:
    """Do a child's work and end its process: finalizing an interpreter under granian's threads aborts it."""
    code = 0
    try:
        work()
    except (FtserveError, ValueError, OSError, RuntimeError) as exc:
        cause = f" {exc.__cause__}" if isinstance(exc, EngineDeadError) else ""
        channel.send("failed", reason=f"{exc}{cause}")
        code = 1
    except BaseException:
        log.exception("a process of ours failed")
        code = 1
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(reason: str) -> int:
    sys.stderr.write(f"ftserve: {reason}\n")
    return 1
