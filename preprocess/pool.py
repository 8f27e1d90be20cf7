"""The preprocessing threads.

Guarantees:
    - A job that was accepted runs exactly once, on one thread, unless the pool is closed first; then `abandon` is
      called with it, once.
    - Each thread builds its own worker state (tokenizer, template), so no job takes a lock that another job holds.

Shared fields: the queue, and `_is_closed`, set once. `queue.SimpleQueue` takes a per-object mutex for tens of
nanoseconds and hands an item directly to a parked reader; the pool is allowed to block, so it needs no lock-free
structure. `put` reads `_is_closed` after it has queued its job, and `close` sets it before it empties the queue: one of
them finds the job.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

log = logging.getLogger("ftserve.preprocess")

J = TypeVar("J")


class PreprocessPool(Generic[J]):
    """`num_threads` threads that take jobs first come, first served."""

    def __init__(
        self,
        num_threads: int,
        make_worker: Callable[[int], Callable[[J], None]],
        abandon: Callable[[J], None],
    ) -> None:
        """Prepare the pool.

        Args:
            make_worker: called once on each thread with its number; what it returns is called with each job and must
                not raise.
            abandon: called with each job that the closed pool will not run; on the closing thread, or on the one that
                put it.
        """
        self._jobs: SimpleQueue[J | None] = SimpleQueue()
        self._make_worker = make_worker
        self._abandon = abandon
        self._is_closed = False
        self._loaded = threading.Semaphore(0)
        self._failures: SimpleQueue[BaseException] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(k,), name=f"ftserve-pre-{k}", daemon=True)
            for k in range(num_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_loaded(self) -> None:
        """Wait until every thread has built its worker; re-raises what one of them raised."""
        for _ in self._threads:
            self._loaded.acquire()
        try:
            raise self._failures.get_nowait()
        except Empty:
            return

    def put(self, job: J) -> None:
        """Queue a job. Any thread; never blocks. Whoever calls bounds how many are in flight."""
        self._jobs.put(job)
        if self._is_closed:
            self._abandon_waiting()

    def depth(self) -> int:
        """Return how many jobs wait for a thread."""
        return self._jobs.qsize()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop after the running jobs; abandon those that wait. False if a thread has not ended in time."""
        self._is_closed = True
        self._abandon_waiting()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _abandon_waiting(self) -> None:
        """Empty the queue of jobs; the marks that end threads stay in it."""
        num_marks = 0
        with contextlib.suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is None:
                    num_marks += 1
                else:
                    self._abandon(job)
        for _ in range(num_marks):
            self._jobs.put(None)

    def _run(self, number: int) -> None:
        try:
            work = self._make_worker(number)
        except BaseException as exc:  # noqa: BLE001 - raised again by `wait_loaded`
            self._failures.put(exc)
            return
        finally:
            self._loaded.release()
        get = self._jobs.get
        while (job := get()) is not None:
            try:
                work(job)
            except Exception:
                log.exception("a preprocessing job raised; its request is lost, which is a bug")
            del job  # a parked thread must not keep the last request alive
