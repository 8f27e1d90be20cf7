"""Several engines behind one client: the same answers, the load spread, prefixes kept together."""

from __future__ import annotations

import copy
import random
import threading
from array import array
from collections import Counter, defaultdict

import pytest

from ftserve.engine.client import EngineClient
from ftserve.engine.errors import EngineDeadError
from ftserve.engine.loop import EngineState
from ftserve.engine.null import NullStepper
from ftserve.engine.router import EngineRouter, prefix_digests
from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams
from tests.engine.conftest import Tiny
from tests.engine.test_loop import WAIT_S, DyingStepper, Sink, null_stepper


def placed(router: EngineRouter, prompt: list[int], max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        index=0,
        prompt_ids=array("I", prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        lane=0,
        route=None,
        replica=router.place(array("I", prompt)),
    )


def router_of(*steppers: NullStepper) -> tuple[EngineRouter, Sink]:
    """Return a started router, and the one sink of all its engines."""
    sink = Sink()
    router = EngineRouter(
        [EngineClient(lambda stepper=stepper: stepper, [sink]) for stepper in steppers]  # type: ignore[misc]
    )
    router.start()
    assert router.wait_loaded(WAIT_S)
    return router, sink


def test_requests_without_a_common_prefix_are_spread_by_what_is_unfinished() -> None:
    router, sink = router_of(*(null_stepper(max_num_seqs=64, step_ms=1.0) for _ in range(3)))
    requests = []
    for k in range(30):
        requests.append(placed(router, [k], max_tokens=900))
        router.submit(requests[-1])
    assert Counter(request.replica for request in requests) == {0: 10, 1: 10, 2: 10}
    for request in requests:
        if request.replica == 1:
            router.cancel(request)
    sink.collect(10)
    assert [placed(router, [99]).replica for _ in range(2)] == [1, 1]
    assert router.close()
    assert router.stats().num_ended == 30


def test_a_conversation_stays_where_its_prefix_is_until_that_engine_is_far_busier() -> None:
    router, _ = router_of(*(null_stepper(max_num_seqs=64, step_ms=50.0) for _ in range(2)))  # none ends on its own
    system, other = list(range(200)), list(range(500, 700))
    home = router.place(system)
    router.submit(placed(router, other, max_tokens=700))
    sent = []
    for turn in range(20):
        request = placed(router, [*system, *range(300, 300 + turn)], max_tokens=700)
        router.submit(request)
        sent.append(request.replica)
    assert sent[:4] == [home] * 4
    assert set(sent) == {0, 1}, "the load is shared in the end"
    assert router.close()


def test_a_salt_separates_prefixes() -> None:
    ids = array("I", range(300))
    assert len(prefix_digests(ids, b"")) == 3
    assert not set(prefix_digests(ids, b"")) & set(prefix_digests(ids, b"tenant"))
    assert prefix_digests(ids, b"")[:2] == prefix_digests(array("I", range(128)), b"")
    assert prefix_digests(array("I", range(63)), b"") == []


def test_the_others_go_on_when_one_engine_dies() -> None:
    router, sink = router_of(DyingStepper(range(100), max_num_seqs=8, max_model_len=1000), null_stepper())
    doomed = placed(router, [1], max_tokens=50)
    assert doomed.replica == 0
    router.submit(doomed)
    (final,) = (event for event in sink.collect(1) if event.finish_reason is not None)
    assert isinstance(final.error, EngineDeadError)
    assert (router.state, router.death) == (EngineState.READY, None)
    later = [placed(router, [k]) for k in range(5)]
    for request in later:
        router.submit(request)
    ends = {event.request: event.finish_reason for event in sink.collect(6) if event.finish_reason is not None}
    assert [ends[request] for request in later] == [FinishReason.LENGTH] * 5
    assert {request.replica for request in later} == {1}
    assert router.close()


def test_all_engines_dead_is_the_routers_death() -> None:
    router, sink = router_of(*(DyingStepper(range(100), max_num_seqs=8, max_model_len=1000) for _ in range(2)))
    for k in range(2):
        router.submit(placed(router, [k], max_tokens=50))
    sink.collect(2)
    router.submit(placed(router, [7]))
    sink.collect(3)
    assert router.state is EngineState.DEAD
    assert isinstance(router.death, EngineDeadError)
    assert router.close()


def test_an_engine_that_cannot_be_loaded_fails_the_start() -> None:
    def fail() -> NullStepper:
        raise RuntimeError("no memory")

    router = EngineRouter([EngineClient(null_stepper, [Sink()]), EngineClient(fail, [Sink()])])
    router.start()
    with pytest.raises(EngineDeadError):
        router.wait_loaded(WAIT_S)
    assert router.close()


def test_threads_that_submit_and_cancel_at_once_get_one_final_event_for_each_request() -> None:
    router, sink = router_of(*(null_stepper(max_num_seqs=16) for _ in range(3)))
    num_threads, each = 8, 300
    barrier = threading.Barrier(num_threads)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        barrier.wait()
        for _ in range(each):
            request = placed(router, [rng.randrange(50)] * rng.choice((1, 70, 200)), rng.randrange(1, 20))
            router.submit(request)
            if rng.random() < 0.3:
                router.cancel(request)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    events = sink.collect(num_threads * each)
    for thread in threads:
        thread.join()
    finals = Counter(event.request for event in events if event.finish_reason is not None)
    assert set(finals.values()) == {1}
    assert router.close()
    stats = router.stats()
    assert (stats.num_ended, stats.num_live) == (num_threads * each, 0)


def test_two_replicas_of_a_model_answer_as_one(tiny_llama: Tiny) -> None:
    sink = Sink()
    twin = Tiny(copy.deepcopy(tiny_llama.reference.config))
    batchers = [replica.batcher() for replica in (tiny_llama, twin)]
    router = EngineRouter([EngineClient(lambda batcher=batcher: batcher, [sink]) for batcher in batchers])  # type: ignore[misc]
    router.start()
    assert router.wait_loaded(WAIT_S)
    rng = random.Random(3)
    for _ in range(16):
        router.submit(placed(router, [rng.randrange(128) for _ in range(rng.randrange(1, 90))], 8))
    said: dict[GenerationRequest, list[int]] = defaultdict(list)
    for event in sink.collect(16):
        said[event.request] += event.token_ids
    assert {request.replica for request in said} == {0, 1}
    for request, tokens in said.items():
        assert tokens == tiny_llama.greedy(request.prompt_ids, 8)
    assert router.close()
