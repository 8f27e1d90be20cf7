"""The inbox under many producers: nothing lost, order kept, a parked consumer woken exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftserve.engine.inbox import HAS_ATOMICS, AtomicInbox, DequeInbox, Inbox, make_inbox

KINDS = [
    pytest.param(AtomicInbox, marks=pytest.mark.skipif(not HAS_ATOMICS, reason="no ft_utils here")),
    DequeInbox,
]
Make = Callable[[], Inbox[Any]]


@pytest.mark.parametrize("make", KINDS)
def test_drain_returns_items_in_the_order_of_their_puts(make: Make) -> None:
    inbox = make()
    for k in range(10):
        inbox.put(k)
    assert inbox.drain() == list(range(10))
    assert inbox.drain() == []


@pytest.mark.parametrize("make", KINDS)
def test_eight_producers_lose_nothing_and_keep_their_order(make: Make) -> None:
    producers, items = 8, 100_000
    inbox, barrier = make(), threading.Barrier(8)

    def produce(number: int) -> None:
        barrier.wait()
        for k in range(items):
            inbox.put((number, k))

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(producers)]
    for thread in threads:
        thread.start()
    expected = [0] * producers
    while sum(expected) < producers * items:
        for number, k in inbox.wait(timeout_s=30):
            assert k == expected[number]
            expected[number] += 1
    for thread in threads:
        thread.join()
    assert inbox.drain() == []
    assert inbox.statistics().drained == producers * items


@pytest.mark.parametrize("make", KINDS)
def test_a_consumer_that_keeps_parking_is_woken_for_each_item(make: Make) -> None:
    """One item at a time, answered before the next: a lost wake-up would hang, a doubled one would find nothing."""
    inbox, replies = make(), make()

    def echo() -> None:
        for _ in range(5_000):
            for item in inbox.wait():
                replies.put(item)

    thread = threading.Thread(target=echo)
    thread.start()
    for k in range(5_000):
        inbox.put(k)
        assert replies.wait(timeout_s=30) == [k]
    thread.join()


@pytest.mark.parametrize("make", KINDS)
def test_time_outs_that_race_with_puts_lose_nothing(make: Make) -> None:
    inbox, total = make(), 3_000
    rng = random.Random(1)

    def produce() -> None:
        for k in range(total):
            inbox.put(k)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 4e-4)

    thread = threading.Thread(target=produce)
    thread.start()
    got: list[int] = []
    while len(got) < total:
        got += inbox.wait(timeout_s=1e-4)
    thread.join()
    assert got == list(range(total))
    assert inbox.wait(timeout_s=0.01) == []  # no wake-up was left over


@pytest.mark.parametrize("make", KINDS)
def test_wait_returns_empty_after_its_time_out(make: Make) -> None:
    inbox = make()
    assert inbox.wait(timeout_s=0.01) == []
    statistics = inbox.statistics()
    assert (statistics.parks, statistics.is_parked) == (1, False)


@pytest.mark.parametrize("make", KINDS)
def test_a_parked_consumer_spends_no_cpu(make: Make) -> None:
    inbox, spent = make(), []

    def consume() -> None:
        inbox.wait()
        spent.append(time.thread_time())

    thread = threading.Thread(target=consume)
    thread.start()
    while not inbox.statistics().is_parked:
        time.sleep(0.001)
    time.sleep(0.5)  # the time over which it must not work
    inbox.put(None)
    thread.join()
    assert spent[0] < 0.1


@pytest.mark.skipif(not HAS_ATOMICS, reason="no ft_utils here")
def test_the_lock_free_inbox_is_the_default() -> None:
    assert make_inbox().statistics().is_lock_free
