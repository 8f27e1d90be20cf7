"""The store of responses stays within its bounds."""

from __future__ import annotations

import threading

from ftserve.server.responses_store import ResponseStore, Running

CHAT = [{"role": "user", "content": "x"}]


def test_the_oldest_go_first() -> None:
    store = ResponseStore(max_chars=1000, max_age_s=60)
    for k in range(10):
        store.put(str(k), "b" * 200, CHAT)
    assert [k for k in range(10) if store.body(str(k)) is not None] == [6, 7, 8, 9]
    assert store.num_chars() <= 1000
    assert store.messages("9") == CHAT


def test_what_is_too_old_is_gone() -> None:
    store = ResponseStore(max_chars=1000, max_age_s=0)
    store.put("a", "b", CHAT)
    assert (store.body("a"), store.messages("a"), store.num_chars()) == (None, None, 0)


def test_one_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_chars=100, max_age_s=60)
    store.put("a", "b" * 200, CHAT)
    assert (store.body("a"), store.num_chars()) == (None, 0)


def test_a_running_response_can_be_seen_until_it_ends() -> None:
    store = ResponseStore(max_chars=100, max_age_s=60)
    store.begin("a", Running("begun", lambda: None))
    assert store.body("a") == "begun"
    assert store.messages("a") is None
    store.end("a")
    store.end("a")
    assert store.body("a") is None


def test_the_count_is_right_after_many_threads() -> None:
    store, barrier = ResponseStore(max_chars=5000, max_age_s=60), threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        for k in range(300):
            store.put(f"{number}-{k}", "b" * (k % 50), CHAT)
            store.body(f"{number}-{k - 1}")
            store.delete(f"{(number + 1) % 8}-{k}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < store.num_chars() <= 5000
    for number in range(8):
        for k in range(300):
            store.delete(f"{number}-{k}")
    assert store.num_chars() == 0
