"""The engine thread: every accepted request ends in exactly one final event, whatever happens."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict

import pytest

from ftserve.engine.client import EngineClient
from ftserve.engine.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError
from ftserve.engine.inbox import make_inbox
from ftserve.engine.loop import EngineState
from ftserve.engine.null import NullStepper
from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams, TokenEvent

WAIT_S = 30.0


class Sink:
    """Collects events; the test is its output thread."""

    def __init__(self) -> None:
        self.inbox = make_inbox()
        self.events: list[TokenEvent] = []

    def put(self, batch: list[TokenEvent]) -> None:
        self.inbox.put(batch)

    def lag(self) -> int:
        return 0

    def collect(self, finals: int) -> list[TokenEvent]:
        """Wait until `finals` requests have ended and return all events so far."""
        deadline = time.monotonic() + WAIT_S
        while sum(event.finish_reason is not None for event in self.events) < finals:
            assert time.monotonic() < deadline, "a request did not end"
            for batch in self.inbox.wait(timeout_s=1.0):
                self.events += batch
        return self.events


class DyingStepper(NullStepper):
    """Raises in its third step."""

    steps = 0

    def step(self) -> list[TokenEvent]:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the device is gone")
        return super().step()


class ClumsyStepper(NullStepper):
    """Has a bug that one request hits."""

    def add(self, request: GenerationRequest) -> None:
        if request.prompt_ids[0] == 13:
            raise KeyError("bug")
        super().add(request)


def null_stepper(max_num_seqs: int = 8, step_ms: float = 0.0) -> NullStepper:
    return NullStepper(range(100), max_num_seqs=max_num_seqs, max_model_len=1000, step_ms=step_ms)


def request(
    max_tokens: int = 5, *, lane: int = 0, prompt: tuple[int, ...] = (1,), **fields: object
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        index=0,
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        lane=lane,
        route=None,
        **fields,  # type: ignore[arg-type]  # the tests name fields of the class
    )


def started(stepper: NullStepper, *sinks: Sink) -> EngineClient:
    client = EngineClient(lambda: stepper, sinks)
    client.start()
    assert client.wait_loaded(WAIT_S)
    return client


def test_tokens_come_in_order_and_end_with_a_reason() -> None:
    sink = Sink()
    client = started(null_stepper(), sink)
    client.submit(request(7))
    events = sink.collect(1)
    assert [token for event in events for token in event.token_ids] == list(range(7))
    assert [event.finish_reason for event in events] == [None] * 6 + [FinishReason.LENGTH]
    assert client.close()


def test_a_request_that_cannot_be_added_ends_with_an_error_and_the_others_go_on() -> None:
    sink = Sink()
    client = started(ClumsyStepper(range(10), max_num_seqs=8, max_model_len=1000), sink)
    bad, too_long, good = request(prompt=(13,)), request(5000), request()
    for each in (bad, too_long, good):
        client.submit(each)
    reasons = {e.request: (e.finish_reason, type(e.error).__name__) for e in sink.collect(3) if e.finish_reason}
    assert reasons[bad] == (FinishReason.ERROR, "EngineRequestError")
    assert reasons[too_long] == (FinishReason.ERROR, InvalidRequestError.__name__)
    assert reasons[good][0] is FinishReason.LENGTH
    assert client.close()


def test_cancel_before_submit_and_twice_and_after_the_end_is_harmless() -> None:
    sink = Sink()
    client = started(null_stepper(step_ms=1.0), sink)
    early, twice = request(3), request(900)
    client.cancel(early)
    client.submit(early)
    client.submit(twice)
    client.cancel(twice)
    client.cancel(twice)
    events = sink.collect(2)
    client.cancel(early)
    finals = {event.request: event.finish_reason for event in events if event.finish_reason}
    assert finals == {early: FinishReason.LENGTH, twice: FinishReason.CANCELLED}
    assert client.close()
    assert client.stats().num_live == 0


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    sink = Sink()
    client = started(null_stepper(max_num_seqs=1, step_ms=2.0), sink)
    running = request(900, deadline=time.monotonic() + 0.1)
    waiting = request(900, deadline=time.monotonic() + 0.1)
    client.submit(running)
    client.submit(waiting)
    finals = [event for event in sink.collect(2) if event.finish_reason]
    assert all(isinstance(event.error, DeadlineExceededError) for event in finals)
    assert client.close()


def test_a_dead_engine_answers_all_requests_live_and_later() -> None:
    sink = Sink()
    client = started(DyingStepper(range(10), max_num_seqs=2, max_model_len=1000), sink)
    for _ in range(5):
        client.submit(request(100))
    finals = [event for event in sink.collect(5) if event.finish_reason]
    assert all(isinstance(event.error, EngineDeadError) for event in finals)
    assert client.state is EngineState.DEAD
    client.submit(request())
    assert len([event for event in sink.collect(6) if event.finish_reason]) == 6
    with pytest.raises(EngineDeadError):
        client.wait_loaded()
    assert client.close()


def test_an_engine_that_cannot_load_says_so() -> None:
    def fail() -> NullStepper:
        raise ValueError("no weights")

    client = EngineClient(fail, [Sink()])
    client.start()
    with pytest.raises(EngineDeadError, match="ValueError"):
        client.wait_loaded(WAIT_S)
    assert client.close()


def test_close_ends_what_is_live() -> None:
    sink = Sink()
    client = started(null_stepper(max_num_seqs=2, step_ms=1.0), sink)
    for _ in range(6):
        client.submit(request(900))
    assert client.close()
    finals = [event for event in sink.collect(6) if event.finish_reason]
    assert {event.finish_reason for event in finals} == {FinishReason.CANCELLED}


@pytest.mark.parametrize("seed", range(3))
def test_random_submits_cancels_and_deadlines_end_each_request_exactly_once(seed: int) -> None:
    """Eight producers, three lanes, cancels from other threads than the submitter's."""
    sinks = [Sink() for _ in range(3)]
    client = started(null_stepper(max_num_seqs=16), *sinks)
    per_producer, barrier = 300, threading.Barrier(8)
    submitted: list[list[GenerationRequest]] = [[] for _ in range(8)]

    def produce(number: int) -> None:
        rng = random.Random(100 * seed + number)
        barrier.wait()
        for k in range(per_producer):
            deadline = time.monotonic() + rng.random() * 0.2 if rng.random() < 0.1 else None
            new = request(rng.choice([1, 2, 5, 50, 2000]), lane=(number + k) % 3, deadline=deadline)
            submitted[number].append(new)
            if rng.random() < 0.1:
                client.cancel(new)
            client.submit(new)
            victims = submitted[rng.randrange(8)]
            if victims and rng.random() < 0.4:
                client.cancel(rng.choice(victims))

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_lane: dict[int, int] = Counter(r.lane for group in submitted for r in group)
    for lane, sink in enumerate(sinks):
        sink.collect(by_lane[lane])
    assert client.close()
    _check_each_ended_once(sinks, [r for group in submitted for r in group])
    assert client.stats().num_live == client.stats().num_running == client.stats().num_waiting == 0


def _check_each_ended_once(sinks: list[Sink], requests: list[GenerationRequest]) -> None:
    events: dict[GenerationRequest, list[TokenEvent]] = defaultdict(list)
    for lane, sink in enumerate(sinks):
        for event in sink.events:
            assert event.request.lane == lane
            events[event.request].append(event)
    assert events.keys() == set(requests)
    for request_events in events.values():
        assert [e.finish_reason is not None for e in request_events].count(True) == 1
        assert request_events[-1].finish_reason is not None
        tokens = [token for event in request_events for token in event.token_ids]
        assert tokens == [k % 100 for k in range(len(tokens))]
