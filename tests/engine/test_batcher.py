"""Steps that are queued before the last one is read, over a device that works as late as it can and remembers all."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftserve.engine.batcher import ContinuousBatcher, Sampled
from ftserve.engine.blocks import BlockPool
from ftserve.engine.errors import EngineRequestError
from ftserve.engine.scheduler import Scheduler, ScoredChunk, StepPlan
from ftserve.engine.sequence import Sequence
from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams, TokenEvent

VOCAB_SIZE = 50
EOS = 0
NOT_A_NUMBER = 49  # a context that ends with this has no next token
BLOCK_SIZE = 4


def next_token(context: list[int]) -> int | None:
    if context[-1] == NOT_A_NUMBER:
        return None
    return (31 * len(context) + 7 * context[0] + sum(context[-3:])) % (VOCAB_SIZE - 1)


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """Return what a sequence says that nothing disturbs; None stands for an error."""
    said: list[int] = []
    while len(said) < max_tokens and EOS not in said:
        token = next_token(prompt + said)
        if token is None:
            break
        said.append(token)
    return said


class Job:
    """One step in the device's queue, with all that it was given copied, as an upload does."""

    def __init__(self, device: Device, plan: StepPlan, unread: Job | None) -> None:
        self._device = device
        self._unread = unread
        self.chosen: list[int | None] | None = None
        self._sampled = [id(sequence) for sequence in plan.sampled()]
        # Of each sequence: who it is, its blocks, what of it is computed now, and its unread token's row.
        self._work = [(id(s), list(s.blocks), s.num_computed, self._ids(s, 1), s.row) for s in plan.decodes]
        self._work += [(id(s), list(s.blocks), s.num_computed, self._ids(s, n), -1) for s, n in plan.prefills]

    def _ids(self, sequence: Sequence, count: int) -> list[int | None]:
        start = sequence.num_computed
        ids: list[int | None] = [*sequence.token_ids[start : start + count]]
        assert len(ids) == count or (sequence.is_unread and len(ids) == count - 1)
        return ids + [None] * (count - len(ids))

    def work(self) -> None:
        memory, contexts = self._device.memory, {}
        for who, blocks, start, ids, row in self._work:
            if ids[-1] is None:
                assert self._unread is not None
                assert self._unread.chosen is not None, "the step before is done"
                ids[-1] = self._unread.chosen[row] or 0
            for position, token in enumerate(ids, start):
                memory[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = token
            seen = [memory[block] for block in blocks]
            contexts[who] = list(itertools.chain(*seen))[: start + len(ids)]
        self.chosen = [next_token(contexts[who]) for who in self._sampled]

    def read(self) -> Sampled:
        self._device.log.append("read")
        self._device.work_until(self)
        assert self.chosen is not None
        return Sampled(self.chosen)


class Device:
    """Both runner and sampler."""

    def __init__(self, num_blocks: int, *, fails_beyond: int = 10**9) -> None:
        self.memory: list[list[Any]] = [[None] * BLOCK_SIZE for _ in range(num_blocks + 1)]
        self.queue: list[Job] = []
        self.log: list[str] = []
        self._fails_beyond = fails_beyond

    def run(self, plan: StepPlan, unread: Job | None) -> Job:
        if plan.num_tokens > self._fails_beyond:
            raise MemoryError
        self.log.append("run")
        self.queue.append(Job(self, plan, unread))
        assert len(self.queue) <= 2, "no more than one step is ahead"
        return self.queue[-1]

    def work_until(self, job: Job) -> None:
        while job.chosen is None:
            self.queue.pop(0).work()

    def prepare(self, sequences: list[Sequence]) -> None:
        self.log.append("prepare")

    def sample(self, logits: Job, sequences: list[Sequence], scored: list[ScoredChunk]) -> Job:
        self.log.append("sample")
        assert not scored
        return logits

    def clear(self, blocks: list[int]) -> None:
        """Nothing to clear: contexts hold what was written for them."""

    def close(self) -> None:
        """Nothing to release."""


def make_batcher(
    *, blocks: int = 100, seqs: int = 8, chunk: int = 16, is_asynchronous: bool = True, fails_beyond: int = 10**9
) -> tuple[ContinuousBatcher[Job, Job], Device]:
    device = Device(blocks, fails_beyond=fails_beyond)
    batcher: ContinuousBatcher[Job, Job] = ContinuousBatcher(
        Scheduler(BlockPool(blocks, BLOCK_SIZE), max_num_seqs=seqs, max_prefill_tokens=chunk),
        device,
        device,
        vocab_size=VOCAB_SIZE,
        max_model_len=200,
        eos_token_ids=frozenset({EOS}),
        is_asynchronous=is_asynchronous,
    )
    return batcher, device


def make_request(prompt: list[int], max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(request_id="r", index=0, prompt_ids=prompt, sampling=sampling, lane=0, route=None)


def drain(
    batcher: ContinuousBatcher[Job, Job], disturb: Callable[[], None] = lambda: None
) -> dict[GenerationRequest, list[TokenEvent]]:
    events: dict[GenerationRequest, list[TokenEvent]] = {}
    while batcher.num_running() or batcher.num_waiting():
        for event in batcher.step():
            events.setdefault(event.request, []).append(event)
        batcher.scheduler.check()
        disturb()
    return events


def said(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_step_is_queued_before_the_one_before_is_read_and_sampled_after() -> None:
    batcher, device = make_batcher()
    batcher.add(make_request([1, 2, 3], 3))
    drain(batcher)
    first = ["prepare", "run", "sample"]
    assert device.log == [*first, *["run", "read", "prepare", "sample"] * 2, "read"]


def test_without_that_each_step_is_read_at_once() -> None:
    batcher, device = make_batcher(is_asynchronous=False)
    batcher.add(make_request([1, 2, 3], 3))
    drain(batcher)
    assert device.log == ["prepare", "run", "sample", "read"] * 3


def test_chunks_of_a_long_prompt_are_no_more_than_one_step_ahead() -> None:
    batcher, device = make_batcher(chunk=4)
    batcher.add(make_request([1] * 40, 1))
    drain(batcher)
    assert Counter(device.log) == dict.fromkeys(("prepare", "run", "sample", "read"), 10)


def test_a_cancelled_sequence_says_nothing_more_and_its_blocks_are_free_at_once() -> None:
    batcher, _ = make_batcher(blocks=12)
    gone, stays = make_request([1, 2, 3], 30), make_request([4, 5, 6], 9)
    batcher.add(gone)
    batcher.add(stays)
    for _ in range(4):
        batcher.step()
    batcher.cancel(gone)
    newcomer = make_request([7] * 20, 9)
    batcher.add(newcomer)
    events = drain(batcher)
    assert events.keys() == {stays, newcomer}
    assert said(events[newcomer]) == alone([7] * 20, 9)


def test_a_step_without_memory_ends_one_prompt_and_loses_no_token() -> None:
    batcher, _ = make_batcher(fails_beyond=14)
    running, large = make_request([1, 2, 3], 9), make_request([4] * 16, 9)
    batcher.add(running)
    early = [event for _ in range(3) for event in batcher.step()]
    batcher.add(large)
    events = drain(batcher)
    assert said(early + events[running]) == alone([1, 2, 3], 9)
    assert [(event.finish_reason, type(event.error)) for event in events[large]] == [
        (FinishReason.ERROR, EngineRequestError)
    ]


LOADS = st.lists(
    st.tuples(
        st.integers(1, 3),  # the first token: prompts share prefixes
        st.integers(1, 30),  # length
        st.integers(1, 20),  # max_tokens
        st.booleans(),  # whether its prompt ends with what is no number
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(LOADS, st.integers(12, 40), st.integers(1, 6), st.integers(1, 20), st.randoms(use_true_random=False))
def test_random_loads_say_what_each_sequence_says_alone(
    load: list[tuple[int, int, int, bool]], blocks: int, seqs: int, chunk: int, rng: random.Random
) -> None:
    batcher, _ = make_batcher(blocks=blocks, seqs=seqs, chunk=chunk)
    requests = []
    for first, length, max_tokens, is_bad in load:
        prompt = [first * (k + 1) % 40 for k in range(length)]
        if is_bad:
            prompt[-1] = NOT_A_NUMBER
        if length + max_tokens - 1 <= blocks * BLOCK_SIZE:
            requests.append(make_request(prompt, max_tokens))
    to_come, cancelled = list(requests), set()
    for request in to_come[:3]:
        batcher.add(request)
    live = set(to_come[:3])
    del to_come[:3]

    def disturb() -> None:
        if to_come and rng.random() < 0.4:
            live.add(to_come[0])
            batcher.add(to_come.pop(0))
        if live and rng.random() < 0.05:
            victim = rng.choice([request for request in requests if request in live])
            live.discard(victim)
            if victim in batcher._sequences:
                batcher.cancel(victim)
                cancelled.add(victim)

    events = drain(batcher, disturb)
    for request in to_come:
        batcher.add(request)
    events |= drain(batcher)
    assert events.keys() | cancelled == set(requests)
    for request, news in events.items():
        expected = alone(list(request.prompt_ids), request.sampling.max_tokens)
        if request in cancelled:
            assert said(news) == expected[: len(said(news))]
            continue
        assert said(news) == expected
        assert [event.finish_reason is None for event in news] == [True] * (len(news) - 1) + [False]


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_blocks_of_generated_tokens_are_found_by_the_next_turn(is_asynchronous: bool) -> None:
    batcher, _ = make_batcher(is_asynchronous=is_asynchronous)
    prompt = [1, 2, 3, 4, 5]
    batcher.add(make_request(prompt, 12))
    (answer,) = (said(events) for events in drain(batcher).values())
    follow_up = make_request([*prompt, *answer, 6], 2)
    batcher.add(follow_up)
    assert drain(batcher)[follow_up][0].num_cached_tokens == 16  # of 17; the last was never computed
