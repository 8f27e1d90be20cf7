"""The gate bounds pixels, keeps the order, refuses what is too much, and holds no thread."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest

from ftserve.engine.errors import OverloadedError
from ftserve.preprocess.gate import PixelGate


def test_what_has_room_starts_at_once() -> None:
    gate, started = PixelGate(10, 10), []
    gate.enter(4, lambda: started.append("a"))
    gate.enter(6, lambda: started.append("b"))
    assert started == ["a", "b"]


def test_what_has_none_waits_in_order_and_is_not_overtaken() -> None:
    gate, started = PixelGate(10, 100), []
    gate.enter(8, lambda: started.append("a"))
    gate.enter(5, lambda: started.append("large"))
    gate.enter(1, lambda: started.append("small"))
    assert started == ["a"]
    assert gate.statistics().pixels_waiting == 6
    gate.leave(8)
    assert started == ["a", "large", "small"]


def test_an_item_larger_than_the_bound_goes_in_alone() -> None:
    gate, started = PixelGate(10, 100), []
    gate.enter(3, lambda: started.append("small"))
    gate.enter(50, lambda: started.append("huge"))
    assert started == ["small"]
    gate.leave(3)
    gate.enter(1, lambda: started.append("next"))
    assert started == ["small", "huge"]
    gate.leave(50)
    assert started == ["small", "huge", "next"]


def test_what_exceeds_the_queue_is_refused_with_a_time_to_come_back() -> None:
    gate = PixelGate(10, 20)
    gate.enter(10, lambda: None)
    gate.enter(15, lambda: None)
    with pytest.raises(OverloadedError) as refused:
        gate.enter(6, lambda: None)
    assert 1 <= refused.value.retry_after_s <= 60
    gate.enter(5, lambda: None)
    assert (gate.statistics().num_waiting, gate.statistics().refused) == (2, 1)


def test_threads_never_exceed_the_bound_and_all_get_in() -> None:
    gate, limit = PixelGate(100, 10**9), 100
    lock, inside, peak, entered = threading.Lock(), 0, 0, threading.Semaphore(0)
    todo: list[int] = []
    rounds, num_threads = 500, 4
    barrier = threading.Barrier(num_threads)

    def start(pixels: int) -> None:
        nonlocal inside, peak
        with lock:
            inside += pixels
            peak = max(peak, inside)
            todo.append(pixels)
        entered.release()

    def work(number: int) -> None:
        nonlocal inside
        rng = random.Random(number)
        barrier.wait()
        for _ in range(rounds):
            pixels = rng.randrange(1, 60)
            gate.enter(pixels, partial(start, pixels))
            assert entered.acquire(timeout=60)
            with lock:
                done = todo.pop()
                inside -= done
            gate.leave(done)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    statistics = gate.statistics()
    assert (statistics.pixels_inside, statistics.num_waiting) == (0, 0)
    assert peak <= limit
