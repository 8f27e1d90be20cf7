"""Garbage collection at moments of our choice: on a free-threaded build a collection stops every thread."""

from __future__ import annotations

import gc
import time

from ftserve.engine.histogram import Histogram

IDLE_INTERVAL_S = 30.0  # between two collections while the engine is idle
MAX_INTERVAL_S = 300.0  # between two collections, whatever happens


class GarbageKeeper:
    """Main thread only, but for `pauses`, which the scraper reads."""

    def __init__(self) -> None:
        self.pauses = Histogram.exponential(0.001, 2.0, 12)  # seconds
        self._last = 0.0
        self._work_then = 0

    def settle(self) -> None:
        """Take what was made at start out of the collector's sight, and stop it from choosing its own moments."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._last = time.monotonic()

    def collect_if_due(self, *, is_idle: bool, work_done: int) -> None:
        """Collect if there was work since the last time and the moment is good, or if it has been too long.

        Requests make no cycles, so this is for what errors leave behind; `work_done` is any count that grows with work.
        """
        age = time.monotonic() - self._last
        if work_done == self._work_then or age < (IDLE_INTERVAL_S if is_idle else MAX_INTERVAL_S):
            return
        began = time.monotonic()
        gc.collect()
        self._last, self._work_then = time.monotonic(), work_done
        self.pauses.observe(self._last - began)
