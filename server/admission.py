"""How many requests may be inside, how many bytes their bodies may hold, and when to come back.

Guarantees: every `enter` that returned a place is matched by one `leave` of it, so both counts return to 0.
One lock, taken three times a request for some tens of nanoseconds; never on a per-token path.
"""

from __future__ import annotations

import threading
import time

from ftserve.engine.errors import OverloadedError

_RATE_DECAY = 0.9  # weight of the past in the moving average, per finished request


class Place:
    """One request inside. Its owner gives it back; both calls may come from any thread, and twice."""

    __slots__ = ("_admission", "_body_bytes", "_is_inside")

    def __init__(self, admission: Admission, body_bytes: int) -> None:
        self._admission = admission
        self._body_bytes = body_bytes
        self._is_inside = True

    def drop_body(self) -> None:
        """Say that the body's bytes are on their way out of memory."""
        with self._admission.lock:
            self._admission.num_body_bytes -= self._body_bytes
            self._body_bytes = 0

    def leave(self) -> None:
        with self._admission.lock:
            if self._is_inside:
                self._is_inside = False
                self._admission.num_body_bytes -= self._body_bytes
                self._admission.count_out()


class Admission:
    """Bounds the requests between their head and the end of their answer, and the bytes of bodies not yet parsed."""

    def __init__(self, max_inside: int, max_body_bytes: int) -> None:
        self.lock = threading.Lock()  # guards every field that changes
        self.num_body_bytes = 0
        self._max_inside = max_inside
        self._max_body_bytes = max_body_bytes
        self._inside = 0
        self._interval_s = 0.0  # moving average of the time between two finished requests while busy
        self._last_leave: float | None = None
        self._empty = threading.Event()
        self._empty.set()

    def enter(self, body_bytes: int) -> Place:
        """Count in one request, whose head announced so many bytes. Any thread.

        Raises:
            OverloadedError: the server is full; says when a place is likely.
        """
        with self.lock:
            is_full = self._inside >= self._max_inside
            if not is_full and self.num_body_bytes + body_bytes <= self._max_body_bytes:
                self._inside += 1
                self.num_body_bytes += body_bytes
                self._empty.clear()
                return Place(self, body_bytes)
            wait_s = self._inside * self._interval_s
        raise OverloadedError(
            f"The server already holds {self._max_inside} requests."
            if is_full
            else f"The server already holds {self._max_body_bytes} bytes of requests.",
            retry_after_s=min(60, max(1, round(wait_s))),
        )

    def count_out(self) -> None:
        """Count one request out; with the lock held."""
        now = time.monotonic()
        self._inside -= 1
        if self._last_leave is not None:
            self._interval_s = _RATE_DECAY * self._interval_s + (1 - _RATE_DECAY) * (now - self._last_leave)
        self._last_leave = now
        if self._inside == 0:
            self._last_leave = None  # idle time says nothing about the rate
            self._empty.set()

    def num_inside(self) -> int:
        return self._inside

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False after `timeout_s`."""
        return self._empty.wait(timeout_s)
