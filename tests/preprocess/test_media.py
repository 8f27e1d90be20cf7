"""The media cache: one decode a key, bounded bytes, every waiter told once, whatever threads do to it."""

from __future__ import annotations

import random
import threading
from collections import Counter

import numpy as np
import pytest

from ftserve.engine.errors import FtserveError, MediaError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.media import MAX_NAMES, Flight, MediaCache, media_key

KB = 1024


def item(key: bytes, nbytes: int = KB) -> MediaItem:
    return MediaItem(
        modality=Modality.IMAGE, patches=np.zeros((1, nbytes), np.uint8), grid=(1, 1, 1), num_tokens=1, digest=key
    )


class Listener:
    """Remembers what it was told, each time."""

    def __init__(self) -> None:
        self.is_over = False
        self.items: list[MediaItem] = []
        self.errors: list[FtserveError] = []
        self.told = threading.Event()

    def deliver(self, item: MediaItem) -> None:
        self.items.append(item)
        self.told.set()

    def fail(self, error: FtserveError) -> None:
        self.errors.append(error)
        self.told.set()


def fill(cache: MediaCache, key: bytes, nbytes: int = KB) -> MediaItem:
    flight = cache.claim(key, Listener())
    assert isinstance(flight, Flight)
    made = item(key, nbytes)
    cache.land(flight, made)
    return made


def test_a_hit_is_the_very_object() -> None:
    cache = MediaCache(10 * KB)
    made = fill(cache, b"a")
    assert cache.claim(b"a", Listener()) is made


def test_who_comes_while_it_is_decoded_waits_for_it() -> None:
    cache, first, second = MediaCache(10 * KB), Listener(), Listener()
    flight = cache.claim(b"a", first)
    assert isinstance(flight, Flight)
    assert cache.claim(b"a", second) is None
    made = item(b"a")
    cache.land(flight, made)
    assert first.items == second.items == [made]
    assert (cache.statistics().decoded, cache.statistics().joined) == (1, 1)


def test_an_error_reaches_everybody_and_is_not_kept() -> None:
    cache, first, second = MediaCache(10 * KB), Listener(), Listener()
    flight = cache.claim(b"a", first, [(b"", Modality.IMAGE, "name")])
    assert isinstance(flight, Flight)
    cache.claim(b"a", second)
    error = MediaError("broken")
    cache.lose(flight, error)
    assert first.errors == second.errors == [error]
    assert isinstance(cache.claim(b"a", Listener()), Flight)
    with pytest.raises(KeyError):
        cache.claim_named((b"", Modality.IMAGE, "name"), Listener())


def test_the_least_recently_used_goes_first() -> None:
    cache = MediaCache(2 * KB)
    fill(cache, b"a")
    fill(cache, b"b")
    assert isinstance(cache.claim(b"a", Listener()), MediaItem)
    fill(cache, b"c")
    assert isinstance(cache.claim(b"a", Listener()), MediaItem)
    assert isinstance(cache.claim(b"b", Listener()), Flight)
    assert cache.statistics().num_bytes == 2 * KB


@pytest.mark.parametrize("max_bytes", [0, KB - 1])
def test_an_item_that_has_no_room_is_delivered_and_not_kept(max_bytes: int) -> None:
    cache, listener = MediaCache(max_bytes), Listener()
    flight = cache.claim(b"a", listener, [(b"", Modality.IMAGE, "name")])
    assert isinstance(flight, Flight)
    cache.land(flight, item(b"a"))
    assert len(listener.items) == 1
    statistics = cache.statistics()
    assert (statistics.num_items, statistics.num_bytes, statistics.num_in_flight) == (0, 0, 0)
    with pytest.raises(KeyError):
        cache.claim_named((b"", Modality.IMAGE, "name"), Listener())


def test_a_flight_that_nobody_waits_for_is_called_off() -> None:
    cache, gone, new = MediaCache(10 * KB), Listener(), Listener()
    flight = cache.claim(b"a", gone)
    assert isinstance(flight, Flight)
    gone.is_over = True
    assert not cache.is_wanted(flight)
    assert isinstance(cache.claim(b"a", new), Flight)
    assert not gone.told.is_set()


def test_a_name_finds_the_item_until_it_is_evicted() -> None:
    cache, name = MediaCache(KB), (b"tenant", Modality.IMAGE, "cat")
    flight = cache.claim(b"a", Listener(), [name])
    assert isinstance(flight, Flight)
    waiter = Listener()
    assert cache.claim_named(name, waiter) is None
    made = item(b"a")
    cache.land(flight, made)
    assert waiter.items == [made]
    assert cache.claim_named(name, Listener(), [(b"tenant", Modality.IMAGE, b"cat")]) is made
    assert cache.claim_named((b"tenant", Modality.IMAGE, b"cat"), Listener()) is made
    for other in ((b"", Modality.IMAGE, "cat"), (b"tenant", Modality.VIDEO, "cat"), (b"tenant", Modality.IMAGE, "c")):
        with pytest.raises(KeyError):
            cache.claim_named(other, Listener())
    fill(cache, b"b")
    with pytest.raises(KeyError):
        cache.claim_named(name, Listener())


def test_a_name_moves_to_the_newest_data_and_names_are_bounded() -> None:
    cache = MediaCache(10 * KB)
    first, second = fill(cache, b"a"), fill(cache, b"b")
    names = [(b"", Modality.IMAGE, str(k)) for k in range(MAX_NAMES + 1)]
    for name in names:
        cache.claim(b"a", Listener(), [name])
    with pytest.raises(KeyError):
        cache.claim_named(names[0], Listener())
    assert cache.claim_named(names[1], Listener()) is first
    cache.claim(b"b", Listener(), [names[1]])
    assert cache.claim_named(names[1], Listener()) is second


def test_keys_tell_bytes_options_tenants_and_cuts_apart() -> None:
    keys = [
        media_key((b"ab",), b"", b""),
        media_key((b"a", b"b"), b"", b""),
        media_key((b"b",), b"a", b""),
        media_key((b"b",), b"", b"a"),
        media_key((), b"ab", b""),
        media_key((), b"", b"ab"),
        media_key((), b"a", b"b"),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("capacity", [KB, 8 * KB])
def test_many_threads_over_few_keys_lose_nobody(capacity: int) -> None:
    """Threads claim, land, lose and leave at random; each listener is told exactly once, or has left."""
    cache = MediaCache(capacity)
    num_threads, rounds = 8, 400
    barrier = threading.Barrier(num_threads)
    listeners: list[list[Listener]] = [[] for _ in range(num_threads)]
    in_decode: Counter[bytes] = Counter()
    overlaps = []
    lock = threading.Lock()

    def work(number: int) -> None:
        rng = random.Random(number)
        barrier.wait()
        for _ in range(rounds):
            key, listener = bytes([rng.randrange(12)]), Listener()
            name = (b"", Modality.IMAGE, str(rng.randrange(6)))
            found = cache.claim(key, listener, [name] if rng.random() < 0.3 else [])
            if isinstance(found, MediaItem):
                assert found.digest == key
                continue
            listeners[number].append(listener)
            if not isinstance(found, Flight):
                continue
            listener.is_over = rng.random() < 0.2
            if not cache.is_wanted(found):
                continue
            with lock:
                in_decode[key] += 1
                overlaps.extend([key] if in_decode[key] > 1 else [])
            with lock:
                in_decode[key] -= 1
            if rng.random() < 0.2:
                cache.lose(found, MediaError("broken"))
            else:
                cache.land(found, item(key))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not overlaps
    for listener in (listener for some in listeners for listener in some):
        assert len(listener.items) + len(listener.errors) == 1 or listener.is_over
    statistics = cache.statistics()
    assert statistics.num_in_flight == 0
    assert statistics.num_bytes == KB * statistics.num_items <= capacity
