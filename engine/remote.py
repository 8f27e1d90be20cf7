"""An engine in another process, as a front end sees it: the other side of `host.py`.

Commands go out through one socket, events come in through another, a message a step of the engine.

Guarantees:
    - Every request that was submitted gets exactly one final event, whatever happens to the engine's process.
    - Requests of an engine that has died are ended at once; a new engine gets later ones only.

Shared fields, guarded by one lock that is taken twice a request and never per token: the socket of commands (a ZeroMQ
socket may change threads with a fence between), `_engine`, `_requests` and `_handles`. The receiving thread alone
looks requests up without the lock, a handle at a time: it finds those whose events it can have, since they were
entered before they were sent. `_status` and `_death` are replaced as wholes; readers take one that may be a step old.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep

import zmq

from ftserve.engine import messages
from ftserve.engine.codec import Writer
from ftserve.engine.errors import EngineDeadError, EngineError, EngineRequestError, FtserveError, RequestCancelledError
from ftserve.engine.histogram import Histogram
from ftserve.engine.loop import LAG_PAUSE_S, MAX_LAG_BATCHES, EngineState, EngineStats, EventSink
from ftserve.engine.messages import LINK_BITS, Hello, Status
from ftserve.engine.segments import SegmentWriter
from ftserve.engine.threads import name_this_thread
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent

log = logging.getLogger("ftserve.engine")

EVENT_BACKLOG = 32  # messages that either socket keeps; beyond that the engine sees that we are behind

_NOT_YET = EngineStats(
    state=EngineState.LOADING,
    num_running=0,
    num_waiting=0,
    num_live=0,
    num_ended=0,
    kv_usage=0.0,
    steps=0,
    generated_tokens=0,
    step_age_s=0.0,
    device_busy_s=0.0,
    device_idle_s=0.0,
)


class RemoteEngine:
    """An `Engine` in another process, which may die and be followed by another one."""

    def __init__(self, folder: Path, sinks: Sequence[EventSink], *, slot: int, link: int) -> None:
        """Prepare to listen in `folder`; `link` is a number that no other front end ever has."""
        self._sinks = tuple(sinks)
        self._slot, self._link = slot, link
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(EVENT_BACKLOG)
        self._endpoint = f"ipc://{folder}/events"
        self._events.bind(self._endpoint)
        self._events.bind("inproc://events")
        self._self = self._context.socket(zmq.PUSH)  # under the lock, as all that follows
        self._self.connect("inproc://events")
        self._lock = threading.Lock()
        self._commands: zmq.Socket[bytes] | None = None
        self._engine = 0
        self._next = link << LINK_BITS
        self._requests: dict[int, GenerationRequest] = {}
        self._handles: dict[GenerationRequest, int] = {}
        self._coder = messages.request_coder()
        self._segments = SegmentWriter(folder)
        self._status: Status | None = None
        self._death: EngineDeadError | None = None
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftserve-remote", daemon=True)

    def start(self) -> None:
        """Start to listen; engines are told by `connect`."""
        self._thread.start()

    def connect(self, engine: int, endpoint: str) -> None:
        """Turn to an engine's process, the first one or the follower of one that was lost."""
        with self._lock:
            self._segments.clear()
            self._engine = engine
            self._commands = commands = self._context.socket(zmq.PUSH)
            commands.setsockopt(zmq.LINGER, 0)
            commands.set_hwm(0)  # what is inside is bounded by the server's admission
            commands.connect(endpoint)
            hello = messages.pack(messages.HELLO_CODER, Hello(self._slot, self._endpoint))
            commands.send(messages.HELLO + _eight(self._link << LINK_BITS) + hello)

    def lose(self, reason: str) -> None:
        """Give up an engine whose process has ended: its requests end now, and later ones until `connect`."""
        with self._lock:
            if self._commands is not None:
                self._commands.close()
            self._commands = None
            self._engine = 0
            self._death = EngineDeadError(f"The engine has stopped ({reason}).")
            self._self.send(messages.LOST)

    def wait_loaded(self, timeout_s: float | None = None) -> bool:
        """Wait until an engine can serve; False after `timeout_s`."""
        return self._loaded.wait(timeout_s)

    @property
    def state(self) -> EngineState:
        if self._death is not None:
            return EngineState.DEAD
        return EngineState.LOADING if self._status is None else self._status.stats.state

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine died, if it did and no other one has come up yet."""
        return self._death

    @property
    def description(self) -> dict[str, str]:
        return {} if self._status is None else dict(self._status.description)

    def place(self, prompt_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Return 0: the engine's own process chooses among its devices."""
        return 0

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request over; see `EngineClient.submit`."""
        out = Writer()
        self._coder.write(out, request)
        with self._lock:
            handle = self._next
            self._next += 1
            self._requests[handle] = request
            self._handles[request] = handle
            if self._commands is None:
                self._self.send(messages.FAILED + _eight(handle))
                return
            arrays = Writer()
            self._segments.write(arrays, out.arrays)
            self._commands.send(b"".join((messages.SUBMIT, _eight(handle), arrays, out)))

    def cancel(self, request: GenerationRequest) -> None:
        """Ask for the end of a request; see `EngineClient.cancel`."""
        with self._lock:
            handle = self._handles.get(request)
            if handle is not None and self._commands is not None:
                self._commands.send(messages.CANCEL + _eight(handle))

    def stats(self) -> EngineStats:
        status = self._status
        return replace(_NOT_YET if status is None else status.stats, state=self.state)

    def step_seconds(self) -> Histogram:
        status = self._status
        return Histogram(()) if status is None else status.step_seconds()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every live request with a final event and stop to listen; False if it has not ended in time."""
        with self._lock:
            self._self.send(messages.CLOSED)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        name_this_thread("ft-remote")
        while True:
            message = memoryview(self._events.recv())
            kind, data = message[:1], message[1:]
            if kind == messages.EVENTS:
                self._deliver(messages.unpack_events(data, self._requests))
            elif kind == messages.STATUS:
                self._take_status(messages.unpack(messages.STATUS_CODER, data))
            elif kind == messages.FAILED:
                self._fail(data)
            elif kind == messages.LOST:
                self._end_all(FinishReason.ERROR, self._death or EngineError("The engine has stopped."))
            else:
                self._end_all(FinishReason.CANCELLED, RequestCancelledError("The server is stopping."))
                return

    def _take_status(self, status: Status) -> None:
        with self._lock:
            if status.engine != self._engine:  # late news of one that is lost
                return
            self._status = status
            self._death = None if status.death is None else EngineDeadError(status.death)
        if status.stats.state is EngineState.READY:
            self._loaded.set()

    def _fail(self, data: memoryview) -> None:
        handle = int.from_bytes(data, "little")
        request = self._requests.get(handle)
        if request is not None:
            error = self._death or EngineRequestError("The engine could not take this request.")
            self._deliver([(handle, TokenEvent(request, (), FinishReason.ERROR, error=error))])

    def _end_all(self, reason: FinishReason, error: FtserveError) -> None:
        with self._lock:
            live = list(self._requests.items())
        self._deliver([(handle, TokenEvent(request, (), reason, error=error)) for handle, request in live])

    def _deliver(self, events: list[tuple[int, TokenEvent]]) -> None:
        """Hand each lane its events."""
        lanes: list[list[TokenEvent]] = [[] for _ in self._sinks]
        for handle, event in events:
            if event.finish_reason is not None:
                with self._lock:
                    del self._requests[handle], self._handles[event.request]
            lanes[event.request.lane].append(event)
        for sink, batch in zip(self._sinks, lanes, strict=True):
            if batch:
                sink.put(batch)
                while sink.lag() > MAX_LAG_BATCHES:  # then the sockets fill up, and the engine waits
                    sleep(LAG_PAUSE_S)


def _eight(number: int) -> bytes:
    return number.to_bytes(8, "little")
