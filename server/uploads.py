"""Request bodies on their way in: each has a deadline, so that a client that stalls holds its place for a bounded time.

Guarantees: for each `read`, exactly one of `then`, `failed` and the refusal by `expire` or `abort` happens.

Shared field: `_deadlines`, under one lock that is taken twice a request. HTTP threads add and remove; the main thread
takes out what is overdue. Whoever wins the exchange's body (`Exchange.read_body`, `Exchange.stop_reading`) answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ftserve.server.exchange import Exchange
from ftserve.server.problems import Problem

SLOW_BODY = Problem(408, "timeout_error", "The body was not received in time.", code="body_timeout")


class Uploads:
    """The exchanges whose bodies are being read."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._deadlines: dict[Exchange, float] = {}  # in the order of the deadlines, since all have the same time

    def read(self, exchange: Exchange, then: Callable[[], None], failed: Callable[[], None]) -> None:
        """Read the body, then call `then`; or `failed`, if the client did not send it whole. HTTP thread."""
        with self._lock:
            self._deadlines[exchange] = time.monotonic() + self._timeout_s

        def over(callback: Callable[[], None]) -> Callable[[], None]:
            def call() -> None:
                with self._lock:
                    self._deadlines.pop(exchange, None)
                callback()

            return call

        exchange.read_body(over(then), over(failed))

    def expire(self) -> None:
        """Refuse what is overdue. Main thread, every second or so."""
        now = time.monotonic()
        overdue = []
        with self._lock:
            for exchange, deadline in self._deadlines.items():
                if deadline > now:
                    break
                overdue.append(exchange)
        self._refuse(overdue, SLOW_BODY)

    def abort(self, problem: Problem) -> None:
        """Refuse whatever is still being read. Main thread."""
        with self._lock:
            exchanges = [*self._deadlines]
        self._refuse(exchanges, problem)

    def num_reading(self) -> int:
        return len(self._deadlines)

    def _refuse(self, exchanges: list[Exchange], problem: Problem) -> None:
        for exchange in exchanges:
            with self._lock:
                self._deadlines.pop(exchange, None)
            if exchange.stop_reading():
                exchange.refuse(problem)
