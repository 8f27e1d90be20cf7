"""The load generator: one thread, one epoll set, as many connections as the load needs.

Closed loop: `concurrency` clients, each sending its next request when it has its answer. Open loop: requests start when
they are due, whatever became of the others; a request that starts late, because the generator or its connections were
not ready, is counted from the moment it was due, so that a stalled server cannot hide behind a stalled client.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftserve.server.bench.connection import Connection
from ftserve.server.bench.results import Record
from ftserve.server.bench.workload import Item

_TICK_S = 0.25
_READ, _WRITE = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much load, and until when. With `arrivals` the loop is open, else `concurrency` clients are closed."""

    arrivals: Iterator[float] | None = None  # seconds since the beginning, ascending
    concurrency: int = 32
    max_requests: int | None = None
    duration_s: float | None = None  # no request is due after it
    max_connections: int = 4096
    timeout_s: float = 600.0  # of one request
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Progress:
    """What a progress line shows."""

    elapsed_s: float = 0.0
    sent: int = 0
    done: int = 0
    failed: int = 0
    open: int = 0
    tokens: int = 0


def resolve(host: str, port: int) -> str:
    """Return the address of a host, once and not for each connection.

    Raises:
        OSError: there is none.
    """
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


class LoadGenerator:
    """Runs one plan once."""

    def __init__(self, host: str, port: int, items: Iterator[Item], plan: Plan) -> None:
        self._address = (resolve(host, port), port)
        self._items = items
        self._plan = plan
        extra = "".join(f"{name}: {value}\r\n" for name, value in plan.headers)
        self._head = f"host: {host}:{port}\r\ncontent-type: application/json\r\n{extra}content-length: "
        self._epoll = select.epoll()
        self._busy: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._late: deque[tuple[float, Item]] = deque()  # due, and no connection was left
        self._alarms: list[tuple[float, int, Connection, Record]] = []  # heap: when clients go away
        self._numbers = itertools.count()
        self._records: list[Record] = []
        self._began = 0.0
        self.progress = Progress()

    def run(self, on_tick: Callable[[Progress], None] | None = None) -> list[Record]:
        """Send everything and wait for all answers; `on_tick` is called a few times a second."""
        with self._epoll:
            try:
                self._run(on_tick)
            finally:
                for connection in (*self._busy.values(), *self._idle):
                    connection.close()
        return self._records

    def _run(self, on_tick: Callable[[Progress], None] | None) -> None:
        self._began = time.perf_counter()
        due = self._due_times()
        next_due = next(due, None)
        next_tick = self._began + _TICK_S
        while next_due is not None or self._busy or self._late:
            now = time.perf_counter()
            while next_due is not None and next_due <= now:
                self._start(next(self._items), next_due)
                next_due = next(due, None)
            self._ring_alarms(now)
            if now >= next_tick:
                next_tick = now + _TICK_S
                self._tick(now, on_tick)
            wake = min(next_tick, next_due or next_tick, self._alarms[0][0] if self._alarms else next_tick)
            for fd, events in self._epoll.poll(max(0.0, wake - now)):
                if (connection := self._busy.get(fd)) is not None:
                    self._serve(connection, events)

    def _due_times(self) -> Iterator[float]:
        """Yield when requests are due; in a closed loop only those that open it."""
        plan, began = self._plan, self._began
        if plan.arrivals is None:
            count = plan.concurrency if plan.max_requests is None else min(plan.concurrency, plan.max_requests)
            yield from itertools.repeat(began, count)
            return
        for number, offset in enumerate(plan.arrivals):
            if number == plan.max_requests or (plan.duration_s is not None and offset > plan.duration_s):
                return
            yield began + offset

    def _may_go_on(self, now: float) -> bool:
        """Tell whether a closed loop's client sends another request."""
        plan = self._plan
        if plan.arrivals is not None:
            return False
        in_time = plan.duration_s is None or now - self._began < plan.duration_s
        return in_time and (plan.max_requests is None or self.progress.sent < plan.max_requests)

    def _start(self, item: Item, intended: float) -> None:
        if not self._idle and len(self._busy) >= self._plan.max_connections:
            self._late.append((intended, item))
            return
        record = Record(item.kind, intended)
        self._records.append(record)
        self.progress.sent += 1
        request = f"POST {item.path} HTTP/1.1\r\n{self._head}{len(item.body)}\r\n\r\n".encode() + item.body
        try:
            connection = self._connection()
        except OSError as exc:
            record.failure, record.ended = f"connect: {exc.strerror or exc}", time.perf_counter()
            self.progress.done += 1
            self.progress.failed += 1
            return
        record.sent = time.perf_counter()
        self._busy[connection.fd] = connection
        try:
            if not connection.begin(record, request):
                self._epoll.modify(connection.fd, _WRITE)
        except OSError as exc:
            record.failure = f"connect: {exc.strerror or exc}"
            self._close_record(connection)
            connection.close()
            return
        if item.cancel_after_s is not None:
            alarm = (record.sent + item.cancel_after_s, next(self._numbers), connection, record)
            heapq.heappush(self._alarms, alarm)

    def _connection(self) -> Connection:
        """Return an idle connection that still stands, else a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()
        connection = Connection(self._address)
        self._epoll.register(connection.fd, _READ)
        return connection

    def _ring_alarms(self, now: float) -> None:
        while self._alarms and self._alarms[0][0] <= now:
            _, _, connection, record = heapq.heappop(self._alarms)
            if connection.record is record:
                record.is_cancelled = True
                self._lose(connection, "")

    def _give_up_on_late(self, now: float) -> None:
        for connection in tuple(self._busy.values()):
            assert connection.record is not None
            if now - connection.record.sent > self._plan.timeout_s:
                self._lose(connection, "timeout")

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT and connection.send():
                self._epoll.modify(connection.fd, _READ)
            if events & ~select.EPOLLOUT and connection.receive(time.perf_counter()):
                self._complete(connection)
        except OSError as exc:
            self._lose(connection, f"connection: {exc.strerror or exc}")
        except ValueError:
            self._lose(connection, "no HTTP")

    def _complete(self, connection: Connection) -> None:
        self._close_record(connection)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        self._go_on()

    def _lose(self, connection: Connection, failure: str) -> None:
        """End a request without its answer, and its connection with it."""
        assert connection.record is not None
        connection.record.failure = failure
        self._close_record(connection)
        connection.close()
        self._go_on()

    def _close_record(self, connection: Connection) -> None:
        record = connection.record
        assert record is not None
        record.ended = time.perf_counter()
        del self._busy[connection.fd]
        connection.record = None
        progress = self.progress
        progress.done += 1
        progress.failed += bool(record.failure)
        progress.tokens += record.tokens

    def _go_on(self) -> None:
        now = time.perf_counter()
        if self._late:
            intended, item = self._late.popleft()
            self._start(item, intended)
        elif self._may_go_on(now):
            self._start(next(self._items), now)

    def _tick(self, now: float, on_tick: Callable[[Progress], None] | None) -> None:
        self._give_up_on_late(now)
        self.progress.elapsed_s = now - self._began
        self.progress.open = len(self._busy) + len(self._late)
        if on_tick is not None:
            on_tick(self.progress)
