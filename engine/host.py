"""The engine's process as front ends in other processes see it: the other side of `remote.py`.

The main thread takes commands from one socket into the engine's inbox, and says how the engine is. Events go straight
from the engine's thread into a socket for each front end, a message a step.

Guarantees:
    - A front end that has gone leaves nothing behind: its requests are cancelled, what comes late from it is dropped.
    - A front end that takes no events for `STALL_S` counts as gone, so that the others do not wait for it for ever.

Shared fields, guarded by a lock for each front end that is taken once a step and twice a request: those of `Lane`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from ftserve.engine import messages
from ftserve.engine.client import Engine
from ftserve.engine.codec import Reader
from ftserve.engine.errors import EngineError
from ftserve.engine.grammar import Grammar
from ftserve.engine.loop import EngineState
from ftserve.engine.messages import LINK_BITS, Status
from ftserve.engine.remote import EVENT_BACKLOG
from ftserve.engine.segments import read_arrays
from ftserve.engine.types import GenerationRequest, TokenEvent

log = logging.getLogger("ftserve.engine")

STALL_S = 10.0
_BUSY_TICK_S = 0.05  # how often front ends are told how the engine is
_IDLE_TICK_S = 1.0
_LINGER_MS = 1000
_PENDING_TICK_S = 0.002  # how often events that found a full socket are sent again


class Lane:
    """One front end: the `EventSink` of its events, whichever process fills its place."""

    def __init__(self) -> None:
        self.link = 0  # of the process that has this place now; 0: none
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None
        self._live: dict[int, GenerationRequest] = {}
        self._pending: deque[bytes] = deque()
        self._full_since = 0.0  # time.monotonic(), while `_pending` holds something

    def feed(self) -> Lane:
        """Return the way in, which all engines share."""
        return self

    def attach(self, link: int, socket: zmq.Socket[bytes]) -> None:
        """Give the place to another process; `detach` what was there before."""
        with self._lock:
            self.link, self._socket = link, socket

    def detach(self) -> list[GenerationRequest]:
        """Forget the process and return what it leaves behind."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=0)
            self.link, self._socket = 0, None
            self._pending.clear()
            left = list(self._live.values())
            self._live.clear()
        return left

    def close(self) -> None:
        """Give the process what waits for it, if it takes that soon."""
        self.flush()
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=_LINGER_MS)
                self._socket = None

    def enter(self, request: GenerationRequest, handle: int) -> None:
        """Remember a request before it is submitted."""
        with self._lock:
            self._live[handle] = request

    def find(self, handle: int) -> GenerationRequest | None:
        """Return a request that has not ended."""
        with self._lock:
            return self._live.get(handle)

    def put(self, batch: list[TokenEvent]) -> None:
        message = messages.pack_events(batch)
        ended = [event.request.route for event in batch if event.finish_reason is not None]
        with self._lock:
            for handle in ended:
                self._live.pop(handle, None)  # type: ignore[call-overload]  # the route is the handle
            self._send(message)

    def lag(self) -> int:
        """Return how many messages wait for room in the socket."""
        return self.flush() if self._pending else 0

    def tell(self, message: bytes) -> None:
        """Send what is no event, unless events wait already."""
        with self._lock:
            if not self._pending:
                self._send(message)

    def flush(self) -> int:
        """Send again what found the socket full, and return how much is left."""
        with self._lock:
            while self._pending and self._try_send(self._pending[0]):
                self._pending.popleft()
                self._full_since = time.monotonic()
            if self.is_stalled():
                self._pending.clear()  # the main thread, which sees it too, detaches it
                return 0
            return len(self._pending)

    def is_stalled(self) -> bool:
        return bool(self._pending) and time.monotonic() - self._full_since > STALL_S

    def _send(self, message: bytes) -> None:
        if self._pending or not self._try_send(message):
            if not self._pending:
                self._full_since = time.monotonic()
            self._pending.append(message)

    def _try_send(self, message: bytes) -> bool:
        if self._socket is None:
            return True  # nobody listens
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class EngineHost:
    """Serves an engine to front ends. Main thread only."""

    def __init__(
        self,
        engine: Engine,
        lanes: Sequence[Lane],
        *,
        number: int,
        endpoint: str,
        compile_grammar: Callable[[str], Grammar],
        stalled: Callable[[int], object],
        step_timeout_s: float,
    ) -> None:
        """Listen at `endpoint`; `stalled` is called with the link of a front end that takes no events any more."""
        self._engine = engine
        self._lanes = tuple(lanes)
        self._number = number
        self._stalled = stalled
        self._step_timeout_s = step_timeout_s
        self._coder = messages.request_coder(compile_grammar)
        self._gone: set[int] = set()  # links
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._commands.bind(endpoint)
        self._last_told: tuple[object, ...] = ()
        self._next_tick = 0.0

    def serve(self, control: int, obey: Callable[[], bool]) -> None:
        """Take commands until `obey`, called when the descriptor `control` is readable, returns False, or death.

        Raises:
            EngineError: a step does not end.
        """
        poller = zmq.Poller()
        poller.register(self._commands, zmq.POLLIN)
        poller.register(control, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(round(1e3 * max(0.0, self._next_tick - time.monotonic()))))
            if control in ready and not obey():
                return
            if self._commands in ready:
                self._take_commands()
            if time.monotonic() >= self._next_tick:
                self._tick()
                if self._engine.death is not None:
                    return

    def close(self) -> None:
        """Hand out what is left, as far as front ends take it, and stop to listen."""
        self._commands.close(linger=0)
        for lane in self._lanes:
            lane.close()
        self._context.term()

    def drop(self, link: int) -> None:
        """Cancel what a front end that has gone has left."""
        self._gone.add(link)
        for lane in self._lanes:
            if lane.link == link:
                left = lane.detach()
                for request in left:
                    self._engine.cancel(request)
                log.info("front end %d has gone; %d of its requests are cancelled", link, len(left))

    def _take_commands(self) -> None:
        try:
            while True:
                self._take(memoryview(self._commands.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        self._next_tick = min(self._next_tick, time.monotonic() + _BUSY_TICK_S)

    def _take(self, message: memoryview) -> None:
        kind, handle, data = message[:1], int.from_bytes(message[1:9], "little"), message[9:]
        link = handle >> LINK_BITS
        if link in self._gone:
            return
        if kind == messages.HELLO:
            self._attach(link, messages.unpack(messages.HELLO_CODER, data))
            return
        lane = next((lane for lane in self._lanes if lane.link == link), None)
        if lane is None:
            return
        if kind == messages.SUBMIT:
            self._submit(lane, handle, data)
        elif (request := lane.find(handle)) is not None:
            self._engine.cancel(request)

    def _attach(self, link: int, hello: messages.Hello) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(EVENT_BACKLOG)
        socket.connect(hello.endpoint)
        lane = self._lanes[hello.slot]
        lane.attach(link, socket)
        lane.tell(self._status())

    def _submit(self, lane: Lane, handle: int, data: memoryview) -> None:
        reader = Reader(data)
        try:
            reader.arrays = read_arrays(reader)
            fields = self._coder.read(reader)
            replica = self._engine.place(fields["prompt_ids"], fields.get("cache_salt", b""))
            request = GenerationRequest(route=handle, lane=self._lanes.index(lane), replica=replica, **fields)
        except Exception:
            log.exception("a request could not be read")
            lane.tell(messages.FAILED + handle.to_bytes(8, "little"))
            return
        lane.enter(request, handle)
        self._engine.submit(request)

    def _tick(self) -> None:
        stats = self._engine.stats()
        if stats.step_age_s > self._step_timeout_s:
            raise EngineError("The engine is stuck in a step.")
        pending = 0
        for lane in self._lanes:
            if lane.is_stalled():
                self._stalled(lane.link)
                self.drop(lane.link)
            pending += lane.flush()
        told = (stats.state, stats.num_live, stats.num_ended, stats.steps)
        is_busy = stats.num_live > 0 or told != self._last_told or stats.state is EngineState.LOADING
        self._last_told = told
        status = self._status()
        for lane in self._lanes:
            lane.tell(status)
        self._next_tick = time.monotonic() + (_PENDING_TICK_S if pending else _BUSY_TICK_S if is_busy else _IDLE_TICK_S)

    def _status(self) -> bytes:
        steps, death = self._engine.step_seconds(), self._engine.death
        status = Status(
            engine=self._number,
            stats=self._engine.stats(),
            bounds=steps.bounds,
            counts=tuple(steps.counts),
            seconds=steps.total,
            description=tuple(self._engine.description.items()),
            death=None if death is None else death.message,
        )
        return messages.STATUS + messages.pack(messages.STATUS_CODER, status)
