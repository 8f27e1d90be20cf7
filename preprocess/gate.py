"""How many pixels may be in decoding at once, over the whole process: what bounds the memory of media.

Sound has none; it counts by the bytes that its decoding takes, three a pixel.

Guarantees:
    - What is inside never exceeds the bound, but for a single item that is larger than it, which goes in alone.
    - First come, first served: a large item is not overtaken by small ones for ever.
    - Nobody waits with a thread: `start` is called when there is room, by whoever made it.

Shared fields: all of them, under one lock that is taken twice an item. `start` is called outside it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ftserve.engine.errors import OverloadedError

_RATE_DECAY = 0.9  # weight of the past in the moving average, per item


@dataclass(frozen=True, slots=True)
class GateStatistics:
    pixels_inside: int
    pixels_waiting: int
    num_waiting: int
    refused: int  # since the start


class PixelGate:
    """Lets items in by their pixels."""

    def __init__(self, max_inside: int, max_waiting: int) -> None:
        self._max_inside = max_inside
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._inside = self._waiting = self._refused = 0
        self._seconds_per_pixel = 0.0  # moving average while there is a queue
        self._last_leave = 0.0

    def enter(self, pixels: int, start: Callable[[], None]) -> None:
        """Call `start` now or as soon as there is room; the one who is in must `leave`.

        Raises:
            OverloadedError: too much waits already; says when to come back.
        """
        with self._lock:
            has_room = not self._queue and self._fits(pixels)
            if has_room:
                self._inside += pixels
            elif self._queue and self._waiting + pixels > self._max_waiting:
                self._refused += 1
                wait_s = self._waiting * self._seconds_per_pixel
                raise OverloadedError(
                    "Too much media waits to be decoded.", retry_after_s=min(60, max(1, round(wait_s)))
                )
            else:
                self._queue.append((pixels, start))
                self._waiting += pixels
        if has_room:
            start()

    def leave(self, pixels: int) -> None:
        """Make room, and start whatever fits into it."""
        started = []
        with self._lock:
            self._inside -= pixels
            self._clock(pixels)
            while self._queue and self._fits(self._queue[0][0]):
                size, start = self._queue.popleft()
                self._waiting -= size
                self._inside += size
                started.append(start)
        for start in started:
            start()

    def statistics(self) -> GateStatistics:
        with self._lock:
            return GateStatistics(self._inside, self._waiting, len(self._queue), self._refused)

    def _fits(self, pixels: int) -> bool:
        return self._inside == 0 or self._inside + pixels <= self._max_inside

    def _clock(self, pixels: int) -> None:
        now = time.monotonic()
        if self._queue and self._last_leave and pixels:
            pace = (now - self._last_leave) / pixels
            self._seconds_per_pixel = _RATE_DECAY * self._seconds_per_pixel + (1 - _RATE_DECAY) * pace
        self._last_leave = now if self._queue else 0.0  # idle time says nothing about the rate
