"""The process's one cache of media, keyed by what the client sent and never by what came out of it.

A key is a digest of the compressed bytes, of every option that changes pixels, and of the tenant's salt, so a hit
decodes nothing, and one tenant cannot ask what another has sent.

Guarantees:
    - While a key is being decoded nobody else decodes it: whoever asks meanwhile waits for the same flight.
    - Every waiter is told once, of the item or of the error, by the thread that lands the flight, outside the lock.
    - The bytes of the items kept never exceed the bound. An item that is in use outlives its eviction.
    - A hit copies nothing: every request gets the same object, which nobody writes to.

Shared fields: all of them, under one lock that is taken once or twice an item and held for dictionary operations only.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ftserve.engine.errors import FtserveError
from ftserve.engine.types import MediaItem, Modality

MAX_NAMES = 16  # of one item; the oldest goes first

Name = tuple[bytes, Modality, str | bytes]  # (salt, kind, the client's uuid or the digest of a `data:` URL)


def media_key(pieces: Sequence[bytes], options: bytes, salt: bytes) -> bytes:
    """Return the identity of `pieces` as decoded with `options`; equal bytes under another salt are another item."""
    digest = hashlib.sha256()
    for piece in (salt, options, *pieces):  # each behind its length, so that none can be cut another way
        digest.update(len(piece).to_bytes(8))
        digest.update(piece)
    return digest.digest()


class Waiter(Protocol):
    """Who wants an item. Called once, on the thread that has it; must not raise."""

    @property
    def is_over(self) -> bool:
        """Whether nobody listens any more. Any thread."""

    def deliver(self, item: MediaItem) -> None: ...

    def fail(self, error: FtserveError) -> None: ...


class Flight:
    """One item on its way into the cache. Whoever got it from `claim` must `land` or `lose` it, unless nobody cares."""

    __slots__ = ("key", "names", "waiters")

    def __init__(self, key: bytes, waiter: Waiter) -> None:
        self.key = key
        self.waiters = [waiter]
        self.names: list[Name] = []


class _Entry:
    __slots__ = ("item", "names")

    def __init__(self, item: MediaItem, names: list[Name]) -> None:
        self.item = item
        self.names = names


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counts since the start, and what is there now."""

    hits: int
    joined: int  # waited for somebody else's decode
    misses: int
    decoded: int
    evictions: int
    num_items: int
    num_bytes: int
    num_in_flight: int


class MediaCache:
    """Decoded media, least recently used out first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._flights: dict[bytes, Flight] = {}
        self._keys: dict[Name, bytes] = {}  # of entries and flights
        self._num_bytes = 0
        self._hits = self._joined = self._misses = self._decoded = self._evictions = 0

    def claim(self, key: bytes, waiter: Waiter, names: Iterable[Name] = ()) -> MediaItem | Flight | None:
        """Return the item; or None if `waiter` will be told; or a flight that the caller has to land.

        `names` are what the item is called from now on.
        """
        with self._lock:
            found: MediaItem | Flight | None = self._find(key, waiter)
            if found is None and key not in self._flights:
                self._misses += 1
                self._flights[key] = found = Flight(key, waiter)
            for name in names:
                self._rename(name, key)
        return found

    def claim_named(self, name: Name, waiter: Waiter, names: Iterable[Name] = ()) -> MediaItem | None:
        """Return the item that has this name; or None if `waiter` will be told. It gets `names` too.

        Raises:
            KeyError: nothing here has that name, or not any more.
        """
        with self._lock:
            key = self._keys[name]
            found = self._find(key, waiter)
            for other in names:
                self._rename(other, key)
        return found

    def has_waiters(self, flight: Flight) -> bool:
        """Whether anybody still waits for the flight."""
        with self._lock:
            return any(not waiter.is_over for waiter in flight.waiters)

    def is_wanted(self, flight: Flight) -> bool:
        """Whether anybody still waits for the flight; if not, it is off, and the caller shall do no more for it."""
        with self._lock:
            if any(not waiter.is_over for waiter in flight.waiters):
                return True
            self._take_off(flight)
            return False

    def land(self, flight: Flight, item: MediaItem) -> None:
        """Keep the item if it has room, and give it to whoever waits."""
        with self._lock:
            self._decoded += 1
            waiters = self._take_off(flight, keep_names=item.nbytes <= self._max_bytes)
            if item.nbytes <= self._max_bytes:
                self._entries[flight.key] = _Entry(item, flight.names)
                self._num_bytes += item.nbytes
                self._evict()
        for waiter in waiters:
            waiter.deliver(item)

    def lose(self, flight: Flight, error: FtserveError) -> None:
        """Tell whoever waits that there is no item. The next to ask tries anew."""
        with self._lock:
            waiters = self._take_off(flight)
        for waiter in waiters:
            waiter.fail(error)

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return CacheStatistics(
                hits=self._hits,
                joined=self._joined,
                misses=self._misses,
                decoded=self._decoded,
                evictions=self._evictions,
                num_items=len(self._entries),
                num_bytes=self._num_bytes,
                num_in_flight=len(self._flights),
            )

    def _find(self, key: bytes, waiter: Waiter) -> MediaItem | None:
        if (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            self._hits += 1
            return entry.item
        if (flight := self._flights.get(key)) is not None:
            self._joined += 1
            flight.waiters.append(waiter)
        return None

    def _rename(self, name: Name, key: bytes) -> None:
        previous = self._keys.get(name)
        if previous == key:
            return
        if previous is not None:
            self._names(previous).remove(name)
        names = self._names(key)
        names.append(name)
        self._keys[name] = key
        if len(names) > MAX_NAMES:
            del self._keys[names.pop(0)]

    def _names(self, key: bytes) -> list[Name]:
        entry = self._entries.get(key)
        return self._flights[key].names if entry is None else entry.names

    def _take_off(self, flight: Flight, *, keep_names: bool = False) -> list[Waiter]:
        del self._flights[flight.key]
        if not keep_names:
            self._forget(flight.names)
        return flight.waiters

    def _evict(self) -> None:
        while self._num_bytes > self._max_bytes:
            _, entry = self._entries.popitem(last=False)
            self._num_bytes -= entry.item.nbytes
            self._evictions += 1
            self._forget(entry.names)

    def _forget(self, names: Iterable[Name]) -> None:
        for name in names:
            del self._keys[name]
