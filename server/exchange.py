"""One HTTP request and its answer, from granian's callback to the last byte.

Ownership: the HTTP thread until the body is read, then the preprocess thread that takes it, then the output thread
that writes the answer. Whoever owns it calls `respond` or `open_stream`, then `end`.

Shared fields, guarded by one lock that is taken a few times a request and never per token:
    - `_body_taken`: granian's completion callback, our own re-check and `stop_reading` race to take the body; who wins
      owns the exchange.
    - `_cancelled`, `_requests`: a disconnect may come at any time, from an HTTP thread. Under the lock it either finds
      the submitted requests and cancels them, or leaves the mark that `submit` finds: no request outlives its client.
    - `_on_cancel`: likewise, for what is still being prepared: images on their way.
    - `_ended`: `end` runs once, whoever comes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from random import getrandbits
from typing import Any

from ftserve.engine.client import Engine
from ftserve.engine.types import GenerationRequest, RequestTimes
from ftserve.server.admission import Place
from ftserve.server.problems import Problem

Headers = Sequence[tuple[str, str]]

_MAX_REQUEST_ID_CHARS = 128


def is_lost(sent: object) -> bool:
    """Whether what granian's `send_str` returned says that the client has gone; it raises nothing then."""
    return type(sent) not in _SENT_TYPES and not _is_sent(type(sent))


_SENT_TYPES: set[type] = set()  # granian does not export it; one entry, added when it is first seen


def _is_sent(kind: type) -> bool:
    if kind.__name__ == "PyErrAwaitable":
        return False
    _SENT_TYPES.add(kind)
    return True


class Inline:
    """Marks a callback as short and thread-safe: `http.InlineLoop` runs it at once on the thread that completes."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback

    def __call__(self, future: Any) -> None:
        self._callback(future)


class Exchange:
    """An HTTP request being answered."""

    __slots__ = (
        "_body_taken",
        "_cancelled",
        "_disconnect",
        "_end",
        "_ended",
        "_engine",
        "_lock",
        "_on_cancel",
        "_on_end",
        "_place",
        "_proto",
        "_reading",
        "_requests",
        "body",
        "extra_headers",
        "headers",
        "method",
        "path",
        "request_id",
        "times",
    )

    def __init__(self, scope: Any, proto: Any, end: Callable[[], None]) -> None:
        """Wrap granian's scope and protocol; `end` tells granian that we are done, from any thread."""
        self.times = RequestTimes(arrival=time.monotonic())
        self.method: str = scope.method
        self.path: str = scope.path
        self.headers: Any = scope.headers  # case-insensitive `get`
        given: str | None = self.headers.get("x-request-id")
        usable = given is not None and 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isprintable()
        self.request_id = given if usable and given is not None else f"{getrandbits(128):032x}"
        self.extra_headers: tuple[tuple[str, str], ...] = (("x-request-id", self.request_id),)  # of every answer
        self.body = b""
        self._proto = proto
        self._end = end
        self._place: Place | None = None
        self._reading: Any = None  # granian's future of the body, until it is taken
        self._lock = threading.Lock()
        self._body_taken = self._cancelled = self._ended = False
        self._requests: Sequence[GenerationRequest] = ()
        self._engine: Engine | None = None
        self._disconnect: Any = None
        self._on_cancel: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None

    def occupy(self, place: Place) -> None:
        """Hold `place` until the exchange ends. The owner only, before it can end."""
        self._place = place

    def read_body(self, then: Callable[[], None], failed: Callable[[], None]) -> None:
        """Read the whole body, then call `then`; or `failed`, if the client did not send it whole."""
        self._reading = future = self._proto()

        def on_body(done: Any) -> None:
            if not self._take_turn():
                return
            self._reading = None
            try:
                self.body = done.result()
            except Exception as exc:  # noqa: BLE001 - whatever it is, the body is not whole
                exc.__traceback__ = None  # it holds this frame, and with it the connection
                failed()
                return
            self.times.body_read = time.monotonic()
            then()

        future.add_done_callback(Inline(on_body))
        if future.done():  # granian can lose the wake-up of a future that completes while we register
            on_body(future)
        elif self._body_taken:  # by `stop_reading`, which may have come too early to cancel
            future.cancel()

    def stop_reading(self) -> bool:
        """Give the body up; True makes the caller the owner, False means that the body was there first. Any thread."""
        if not self._take_turn():
            return False
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()  # frees what was received, and lets granian close the connection after the answer
        return True

    def _take_turn(self) -> bool:
        with self._lock:
            if self._body_taken:
                return False
            self._body_taken = True
            return True

    def take_body(self) -> bytes:
        """Return the body and forget it. The owner only, once."""
        body, self.body = self.body, b""
        if self._place is not None:
            self._place.drop_body()
        return body

    def watch_disconnect(self) -> None:
        """Cancel what this exchange has in the engine when its client closes the connection."""
        self._disconnect = future = self._proto.client_disconnect()
        if not hasattr(future, "add_done_callback"):  # it has closed already
            self.cancel()
            return
        future.add_done_callback(Inline(self._on_disconnect))
        if future.done():
            self._on_disconnect(future)

    def _on_disconnect(self, _future: Any) -> None:
        if not self._ended:  # ending cancels the watcher, which calls us too
            self.cancel()

    def submit(self, engine: Engine, requests: Sequence[GenerationRequest]) -> bool:
        """Submit all of `requests`, unless the client has gone; then return False. Preprocess thread, once."""
        with self._lock:
            if self._cancelled:
                return False
            self._requests, self._engine = requests, engine
            for request in requests:
                engine.submit(request)
        return True

    def cancel(self) -> None:
        """Give up: cancel what was submitted, and let `submit` refuse what was not. Any thread."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            engine, requests = self._engine, self._requests
            give_up, self._on_cancel = self._on_cancel, None
        if give_up is not None:
            give_up()
        if engine is not None:
            for request in requests:
                engine.cancel(request)

    def abort(self) -> None:
        """End what was submitted; unlike after `cancel` the client is still there, and is told. Any thread."""
        with self._lock:
            engine, requests = self._engine, self._requests
        if engine is not None:
            for request in requests:
                engine.cancel(request)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when the exchange ends. The owner only, before it can end."""
        self._on_end = callback

    def on_cancel(self, give_up: Callable[[], None]) -> None:
        """Have `give_up` called when the client goes, at once if it has gone. Preprocess thread, once."""
        with self._lock:
            if not self._cancelled:
                self._on_cancel = give_up
                return
        give_up()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def respond(self, status: int, headers: Headers, body: str) -> None:
        """Send a whole answer and end. The owner only."""
        self._proto.response_str(status, [*headers, *self.extra_headers], body)
        self.end()

    def refuse(self, problem: Problem) -> None:
        """Answer with an error and end. The owner only."""
        self.respond(problem.status, problem.headers(), problem.body())

    def open_stream(self, headers: Headers) -> Any:
        """Send the head of a streamed answer and return granian's transport; drop it before `end`."""
        return self._proto.response_stream(200, [*headers, *self.extra_headers])

    def end(self) -> None:
        """Release the connection. Any thread; the first call counts."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._on_cancel = None
            self._requests, self._engine = (), None  # they lead back here, and collections are rare
        if self._disconnect is not None and hasattr(self._disconnect, "cancel"):
            self._disconnect.cancel()  # a waiter that is left would swallow the next request's disconnect
            self._disconnect = None
        self._end()
        if self._place is not None:
            self._place.leave()
        if self._on_end is not None:
            self._on_end()
