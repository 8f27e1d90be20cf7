"""One store of responses for several front ends: within its bounds, and each knows what the others have made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ftserve.server.responses_shared import SharedResponseStore, create
from ftserve.server.responses_store import Running

CHAT = [{"role": "user", "content": "x"}]
NOBODY: Callable[[str], object] = lambda response_id: None  # noqa: E731


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., SharedResponseStore]:
    create(tmp_path)

    def make(
        slot: int = 0, *, max_chars: int = 1000, max_age_s: float = 60, abort: Callable[[str], object] = NOBODY
    ) -> SharedResponseStore:
        return SharedResponseStore(tmp_path, slot=slot, abort_elsewhere=abort, max_chars=max_chars, max_age_s=max_age_s)

    return make


def test_the_oldest_go_first(make_store: Callable[..., SharedResponseStore]) -> None:
    store, other = make_store(0), make_store(1)
    for k in range(10):
        (store, other)[k % 2].put(str(k), "b" * 200, CHAT)
    assert [k for k in range(10) if store.body(str(k)) is not None] == [6, 7, 8, 9]
    assert 0 < store.num_chars() <= 1000
    assert other.num_chars() == 0
    assert store.messages("9") == other.messages("9") == CHAT
    assert other.delete("9")
    assert not store.delete("9")
    assert store.body("9") is None


def test_what_is_too_old_or_too_large_is_not_kept(make_store: Callable[..., SharedResponseStore]) -> None:
    hasty, small = make_store(max_age_s=0), make_store(max_chars=100)
    hasty.put("a", "b", CHAT)
    small.put("c", "b" * 200, CHAT)
    for store, name in ((hasty, "a"), (small, "c")):
        assert (store.body(name), store.messages(name)) == (None, None)


def test_any_text_is_kept(make_store: Callable[..., SharedResponseStore]) -> None:
    make_store().put("a", "é\ud800🙂\0", [{"role": "user", "content": "\udfff"}])
    assert make_store().body("a") == "é\ud800🙂\0"
    assert make_store().messages("a") == [{"role": "user", "content": "\udfff"}]


def test_a_running_response_is_seen_and_ended_from_elsewhere(make_store: Callable[..., SharedResponseStore]) -> None:
    aborted: list[str] = []
    here = make_store(0, abort=lambda response_id: aborted.append(f"elsewhere {response_id}"))
    there = make_store(1, abort=here.abort)
    here.begin("a", Running("begun", lambda: aborted.append("here")))
    assert there.body("a") == "begun"
    assert there.messages("a") is None
    running = there.running("a")
    assert running is not None
    running.abort()
    assert aborted == ["here"]
    here.end("a")
    here.end("a")
    assert there.running("a") is None


def test_what_a_front_end_was_making_goes_with_it(make_store: Callable[..., SharedResponseStore]) -> None:
    make_store(0).begin("a", Running("begun", lambda: None))
    make_store(1).begin("b", Running("begun", lambda: None))
    next_in_its_place = make_store(0)
    assert next_in_its_place.body("a") is None
    assert next_in_its_place.body("b") == "begun"


def test_the_count_is_right_after_many_threads(make_store: Callable[..., SharedResponseStore]) -> None:
    stores, barrier = [make_store(slot, max_chars=5000) for slot in range(3)], threading.Barrier(6)

    def work(number: int) -> None:
        store = stores[number % 3]
        barrier.wait()
        for k in range(60):
            store.put(f"{number}-{k}", "b" * (k % 50), CHAT)
            store.body(f"{number}-{k - 1}")
            store.delete(f"{(number + 1) % 6}-{k}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < stores[0].num_chars() <= 5000
    for number in range(6):
        for k in range(60):
            stores[0].delete(f"{number}-{k}")
    assert stores[0].num_chars() == 0
