"""The pool runs each job once, or abandons it once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from ftserve.preprocess.pool import PreprocessPool


def test_each_job_runs_once_on_a_worker_of_its_own_thread() -> None:
    ran: Counter[int] = Counter()
    lock, workers = threading.Lock(), set()

    def make_worker(number: int) -> Callable[[int], None]:
        owner = threading.get_ident()
        workers.add(owner)

        def work(job: int) -> None:
            assert threading.get_ident() == owner
            with lock:
                ran[job] += 1

        return work

    pool = PreprocessPool(4, make_worker, lambda job: None)
    pool.start()
    pool.wait_loaded()
    for job in range(2_000):
        pool.put(job)
    while pool.depth():
        pass
    assert pool.close()
    assert len(workers) == 4
    assert ran == Counter(range(2_000))


def test_closing_abandons_what_waits_and_finishes_what_runs() -> None:
    entered, release, done, abandoned = threading.Event(), threading.Event(), [], []

    def work(job: int) -> None:
        entered.set()
        assert release.wait(30)
        done.append(job)

    def abandon(job: int) -> None:
        abandoned.append(job)
        release.set()

    pool = PreprocessPool(1, lambda number: work, abandon)
    pool.start()
    for job in range(3):
        pool.put(job)
    assert entered.wait(30)
    assert pool.close()
    assert (done, abandoned) == ([0], [1, 2])


def test_a_job_that_comes_after_the_end_is_abandoned() -> None:
    abandoned: list[int] = []
    pool: PreprocessPool[int] = PreprocessPool(2, lambda number: lambda job: None, abandoned.append)
    pool.start()
    assert pool.close()
    pool.put(7)
    assert abandoned == [7]


def test_jobs_put_while_the_pool_closes_run_once_or_are_abandoned_once() -> None:
    """Producers race with `close`, again and again."""
    for _ in range(30):
        ended: Counter[int] = Counter()
        lock = threading.Lock()

        def end(job: int, ended: Counter[int] = ended, lock: threading.Lock = lock) -> None:
            with lock:
                ended[job] += 1

        pool: PreprocessPool[int] = PreprocessPool(2, lambda number, end=end: end, end)  # type: ignore[misc]
        pool.start()
        barrier = threading.Barrier(5)

        def produce(first: int, pool: PreprocessPool[int] = pool, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for job in range(first, first + 200):
                pool.put(job)

        producers = [threading.Thread(target=produce, args=(1000 * k,)) for k in range(4)]
        for producer in producers:
            producer.start()
        barrier.wait()
        assert pool.close()
        for producer in producers:
            producer.join()
        assert ended == Counter(1000 * k + job for k in range(4) for job in range(200))


def test_a_worker_that_cannot_be_made_is_reported() -> None:
    def make_worker(number: int) -> Callable[[int], None]:
        raise OSError("no tokenizer")

    pool = PreprocessPool(2, make_worker, lambda job: None)
    pool.start()
    with pytest.raises(OSError, match="no tokenizer"):
        pool.wait_loaded()


def test_a_job_that_raises_does_not_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def work(job: int) -> None:
        if job == 0:
            raise ValueError("bug")
        done.set()

    pool = PreprocessPool(1, lambda number: work, lambda job: None)
    pool.start()
    pool.put(0)
    pool.put(1)
    assert done.wait(30)
    assert pool.close()
    assert "which is a bug" in caplog.text
