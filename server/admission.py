"""How many requests may be inside, and when to come back.

Guarantees: every `try_enter` that returned True is matched by exactly one `leave`, so `num_inside` returns to 0.
One lock, taken twice a request for some tens of nanoseconds; never on a per-token path.
"""

from __future__ import annotations

import threading
import time

from ftserve.engine.errors import OverloadedError

_RATE_DECAY = 0.9  # weight of the past in the moving average, per finished request


class Admission:
    """Bounds the requests between their head and the end of their answer."""

    def __init__(self, max_inside: int) -> None:
        self._max_inside = max_inside
        self._lock = threading.Lock()
        self._inside = 0
        self._interval_s = 0.0  # moving average of the time between two finished requests while busy
        self._last_leave: float | None = None
        self._empty = threading.Event()
        self._empty.set()

    def enter(self) -> None:
        """Count one request in. Any thread.

        Raises:
            OverloadedError: the server is full; says when a place is likely.
        """
        with self._lock:
            if self._inside < self._max_inside:
                self._inside += 1
                self._empty.clear()
                return
            wait_s = self._inside * self._interval_s
        raise OverloadedError(
            f"The server already holds {self._max_inside} requests.", retry_after_s=min(60, max(1, round(wait_s)))
        )

    def leave(self) -> None:
        """Count one request out. Any thread."""
        now = time.monotonic()
        with self._lock:
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
