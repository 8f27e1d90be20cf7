"""The hand-off into a thread that must never wait for its producers.

Many producers push, one consumer takes everything there is. Used into the engine thread (requests, cancels) and
into the output threads (batches of token events).

Guarantees:
    - `put` never blocks and takes no lock: it prepends to an immutable chain by compare-and-swap. A producer that
      loses the race against another one retries; some producer always succeeds (lock-free).
    - `drain` is one atomic exchange, whatever the producers do (wait-free), and returns items in the order in which
      each producer put them.
    - `wait` parks without polling. Exactly one producer wakes a parked consumer, and only a parked one: a put into
      a busy consumer costs no system call.
    - Nothing is lost between threads: an item put before `close` is returned by a later `drain` or `wait`.

Assumptions:
    - One consumer thread at a time calls `drain` and `wait`.
    - `ft_utils.AtomicReference` is sequentially consistent: its `get`, `exchange` and `compare_exchange` are full
      fences. Who writes a flag and then puts is therefore seen by a consumer that takes the item and reads it.

Where `ft_utils` is missing (builds with the GIL, 3.14t for now) `DequeInbox` keeps the same promises except
lock-freedom: `collections.deque` takes the interpreter's per-object lock, held for tens of nanoseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

try:
    from ft_utils.concurrency import AtomicReference
except ImportError:  # pragma: no cover - depends on the build
    AtomicReference = None

HAS_ATOMICS = AtomicReference is not None

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InboxStatistics:
    """Counts since the start; `drained` and `parks` are the consumer's, so they are exact when it reads them."""

    drained: int  # items handed to the consumer
    batches: int  # non-empty drains
    parks: int  # times the consumer went to sleep
    is_parked: bool
    is_lock_free: bool


class Inbox(Protocol[T]):
    """Many producers, one consumer. See the module for what is promised."""

    def put(self, item: T) -> None:
        """Hand `item` over. Any thread; never blocks."""

    def drain(self) -> list[T]:
        """Take all items there are, oldest first. Consumer only; never blocks."""

    def wait(self, timeout_s: float | None = None) -> list[T]:
        """Take all items, parking until there is one. Consumer only; empty after `timeout_s`."""

    def statistics(self) -> InboxStatistics:
        """Return counts. Any thread."""


_PARKED: Any = object()  # head of the chain while the consumer sleeps on an empty inbox


class AtomicInbox(Generic[T]):
    """The lock-free inbox: a chain of (item, older) pairs behind one atomic reference."""

    __slots__ = ("_batches", "_drained", "_head", "_parks", "_wake")

    def __init__(self) -> None:
        self._head = AtomicReference(None)  # None | _PARKED | (item, older); every thread, by CAS only
        self._wake = threading.Lock()  # a binary semaphore, held; released once by the producer that unparks
        self._wake.acquire()
        self._drained = self._batches = self._parks = 0  # consumer only; others may read a stale value

    def put(self, item: T) -> None:
        head = self._head
        while True:
            old = head.get()
            # `old` stays referenced here, so no other chain can have its address: no ABA.
            if head.compare_exchange(old, (item, None if old is _PARKED else old)):
                break
        if old is _PARKED:  # we replaced the mark, so we alone owe the wake-up
            self._wake.release()

    def drain(self) -> list[T]:
        chain = self._head.exchange(None)
        items: list[T] = []
        while chain is not None:
            item, chain = chain
            items.append(item)
        if items:
            items.reverse()
            self._drained += len(items)
            self._batches += 1
        return items

    def wait(self, timeout_s: float | None = None) -> list[T]:
        items = self.drain()
        if items or not self._head.compare_exchange(None, _PARKED):
            return items or self.drain()
        self._parks += 1
        woken = self._wake.acquire(timeout=-1 if timeout_s is None else timeout_s)
        # After a time-out the mark must go. If it is gone already a producer is about to release: take that
        # release, or the next park would return at once.
        if not woken and not self._head.compare_exchange(_PARKED, None):
            self._wake.acquire()
        return self.drain()

    def statistics(self) -> InboxStatistics:
        return InboxStatistics(self._drained, self._batches, self._parks, self._head.get() is _PARKED, True)


class DequeInbox(Generic[T]):
    """The same promises without `ft_utils`, over the interpreter's own per-object lock.

    The order of the two accesses on each side (producer: append, then look for the mark; consumer: leave the mark,
    then look for items) means that at least one of them sees the other. `deque` operations are critical sections
    of the same object on free-threaded builds, which orders what surrounds them.
    """

    __slots__ = ("_batches", "_drained", "_items", "_mark", "_parks", "_wake")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._mark: deque[None] = deque()  # holds one element while the consumer is parked; popping it is the claim
        self._wake = threading.Lock()
        self._wake.acquire()
        self._drained = self._batches = self._parks = 0

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._mark and self._claim():
            self._wake.release()

    def _claim(self) -> bool:
        try:
            self._mark.pop()
        except IndexError:  # another producer, or the consumer's time-out, was first
            return False
        return True

    def drain(self) -> list[T]:
        items: list[T] = []
        try:
            while True:
                items.append(self._items.popleft())
        except IndexError:
            pass
        if items:
            self._drained += len(items)
            self._batches += 1
        return items

    def wait(self, timeout_s: float | None = None) -> list[T]:
        items = self.drain()
        if items:
            return items
        self._mark.append(None)
        items = self.drain()
        if items:
            if not self._claim():
                self._wake.acquire()
            return items
        self._parks += 1
        woken = self._wake.acquire(timeout=-1 if timeout_s is None else timeout_s)
        if not woken and not self._claim():
            self._wake.acquire()
        return self.drain()

    def statistics(self) -> InboxStatistics:
        return InboxStatistics(self._drained, self._batches, self._parks, bool(self._mark), False)


def make_inbox() -> Inbox[Any]:
    """Return the best inbox that this interpreter has."""
    return AtomicInbox() if HAS_ATOMICS else DequeInbox()
