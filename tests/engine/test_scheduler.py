"""The scheduler against random loads, with a device that samples nothing but a counter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftserve.engine.blocks import BlockPool
from ftserve.engine.scheduler import Scheduler, StepPlan
from ftserve.engine.sequence import Sequence, SequenceState
from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams


def make_sequence(
    arrival: int, prompt_ids: list[int], max_tokens: int = 4, *, priority: int = 0, salt: bytes = b""
) -> Sequence:
    request = GenerationRequest(
        request_id=str(arrival),
        index=0,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        lane=0,
        route=None,
        priority=priority,
        cache_salt=salt,
    )
    return Sequence(request, arrival=arrival, max_model_len=1000)


def make_scheduler(
    *, blocks: int = 100, block_size: int = 4, seqs: int = 8, chunk: int = 16, prefix_cache: bool = True
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, block_size), max_num_seqs=seqs, max_prefill_tokens=chunk, use_prefix_cache=prefix_cache
    )


def next_token(sequence: Sequence) -> int:
    return (len(sequence.token_ids) * 31 + sequence.token_ids[0]) % 97


def step(scheduler: Scheduler) -> tuple[StepPlan, list[Sequence]]:
    """Run one step; return its plan and the sequences that ended."""
    plan = scheduler.schedule()
    sampled = plan.sampled()
    scheduler.advance(plan)
    ended = [s for s in sampled if s.append(next_token(s)) is not None]
    for sequence in ended:
        scheduler.remove(sequence)
    scheduler.check()
    return plan, ended


def test_decodes_come_before_chunks_and_do_not_eat_their_budget() -> None:
    scheduler = make_scheduler(chunk=4)
    running = [make_sequence(i, [i], max_tokens=9) for i in range(3)]
    for sequence in running:
        scheduler.add(sequence)
    step(scheduler)
    late = make_sequence(3, list(range(10)))
    scheduler.add(late)
    counts = []
    for _ in range(4):
        plan, _ = step(scheduler)
        counts.append((plan.decodes[:3] == running, [count for s, count in plan.prefills if s is late]))
    assert counts == [(True, [4]), (True, [4]), (True, [2]), (True, [])]


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    scheduler = make_scheduler(chunk=4)
    sequence = make_sequence(0, list(range(6)))
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert (plan.num_tokens, plan.sampled()) == (4, [])
    scheduler.advance(plan)
    plan = scheduler.schedule()
    assert (plan.num_tokens, plan.sampled()) == (2, [sequence])


def test_the_last_in_the_order_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(blocks=6, prefix_cache=False)
    first, second = make_sequence(0, [1] * 7, max_tokens=12), make_sequence(1, [2] * 7, max_tokens=12)
    third = make_sequence(2, [3], max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    while second.num_preemptions == 0:
        step(scheduler)
    scheduler.add(third)
    assert first.num_preemptions == 0
    assert (second.state, second.num_computed, second.blocks) == (SequenceState.WAITING, 0, [])
    assert scheduler.waiting == [second, third]
    ended: list[Sequence] = []
    while len(ended) < 3:
        ended += step(scheduler)[1]
    assert ended[0] is first


def test_who_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(blocks=10)
    running, large, small = (make_sequence(i, [i] * n, max_tokens=2) for i, n in enumerate((17, 30, 1)))
    scheduler.add(running)
    step(scheduler)
    scheduler.add(large)
    scheduler.add(small)
    step(scheduler)
    plan, ended = step(scheduler)
    assert (plan.prefills, ended) == ([], [running])
    assert [s for s, _ in step(scheduler)[0].prefills] == [large]


def test_can_ever_fit_counts_all_but_the_last_token() -> None:
    scheduler = make_scheduler(blocks=3, block_size=4)
    assert scheduler.can_ever_fit(make_sequence(0, [1] * 5, max_tokens=8))
    assert not scheduler.can_ever_fit(make_sequence(1, [1] * 5, max_tokens=9))


def test_sequences_with_one_prompt_share_its_full_blocks() -> None:
    scheduler = make_scheduler(block_size=4)
    prompt = list(range(10))
    first, second, other = make_sequence(0, prompt), make_sequence(1, prompt), make_sequence(2, prompt, salt=b"x")
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    scheduler.add(other)
    step(scheduler)
    assert second.blocks[:2] == first.blocks[:2]
    assert not set(second.blocks[2:]) & set(first.blocks)
    assert (second.num_cached, other.num_cached) == (8, 0)


def test_choices_of_one_prompt_that_come_together_compute_it_once() -> None:
    scheduler = make_scheduler(block_size=4, chunk=6)
    choices = [make_sequence(i, list(range(18))) for i in range(4)]
    for sequence in choices:
        scheduler.add(sequence)
    computed = 0
    while not all(s.output_len for s in choices):
        plan, _ = step(scheduler)
        computed += sum(count for _, count in plan.prefills)
    assert computed == 18 + 3 * 2
    assert [s.num_cached for s in choices] == [0, 16, 16, 16]


def test_a_prompt_waits_only_for_the_part_that_it_shares() -> None:
    scheduler = make_scheduler(block_size=4, chunk=8)
    long, other = make_sequence(0, list(range(40))), make_sequence(1, [*range(8), 50, 51, 52, 53, 54])
    scheduler.add(long)
    scheduler.add(other)
    step(scheduler)
    assert scheduler.waiting == [other]
    while other.output_len == 0:
        step(scheduler)
    assert other.num_cached == 8


@pytest.mark.parametrize(("seqs", "chunk"), [(0, 1), (1, 0)])
def test_a_scheduler_that_could_do_nothing_is_refused(seqs: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="make no step"):
        make_scheduler(seqs=seqs, chunk=chunk)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it arrives
        st.integers(1, 30),  # prompt tokens
        st.integers(0, 2),  # which prompt: many share prefixes
        st.integers(1, 20),  # max_tokens
        st.integers(0, 1),  # priority
        st.none() | st.integers(0, 12),  # cancelled after so many steps
    ),
    max_size=14,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrivals,
    blocks=st.integers(13, 40),
    seqs=st.integers(1, 6),
    chunk=st.integers(1, 20),
    prefix_cache=st.booleans(),
)
def test_random_loads_end_and_leak_nothing(
    arrivals: list[Any], blocks: int, seqs: int, chunk: int, prefix_cache: bool
) -> None:
    scheduler = make_scheduler(blocks=blocks, seqs=seqs, chunk=chunk, prefix_cache=prefix_cache)
    waiting_to_come = list(enumerate(arrivals))
    live: set[Any] = set()
    cancel_at: dict[Any, int] = {}
    ended: list[Any] = []
    clock, due = 0, 0
    while waiting_to_come or live:
        while waiting_to_come and due + waiting_to_come[0][1][0] <= clock:
            arrival, (delay, length, which, max_tokens, priority, patience) = waiting_to_come.pop(0)
            due += delay
            prompt = [(i * 7 + which * (i >= 8)) % 50 for i in range(length)]
            sequence = make_sequence(arrival, prompt, max_tokens, priority=priority)
            assert scheduler.can_ever_fit(sequence)
            scheduler.add(sequence)
            live.add(sequence)
            if patience is not None:
                cancel_at[sequence] = clock + patience
        for sequence, when in list(cancel_at.items()):
            if when == clock and sequence in live:
                scheduler.remove(sequence)
                live.remove(sequence)
                scheduler.check()
        clock += 1
        plan, done = step(scheduler)
        assert sum(count for _, count in plan.prefills) <= chunk
        assert len(scheduler.running) <= seqs
        assert not live or not plan.is_empty, "nothing advances"
        taking_part = plan.decodes + [s for s, _ in plan.prefills]
        assert len(set(taking_part)) == len(taking_part)
        for sequence in done:
            live.remove(sequence)  # KeyError: ended twice
            ended.append(sequence)
        assert clock < 3000
    statistics = scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.blocks.held) == (0, 0, 0)
    for sequence in ended:
        assert sequence.output_len == sequence.request.sampling.max_tokens


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    blocks=st.integers(13, 20),
    chunk=st.integers(1, 9),
    prefix_cache=st.booleans(),
)
def test_every_token_is_computed_once_at_its_place(
    lengths: list[int], blocks: int, chunk: int, prefix_cache: bool
) -> None:
    """Play the device: a cache that records which token was written where, and is read before each sampled token."""
    scheduler = make_scheduler(blocks=blocks, seqs=4, chunk=chunk, prefix_cache=prefix_cache)
    live = {make_sequence(i, [(j * 3) % 11 for j in range(n)], max_tokens=20) for i, n in enumerate(lengths)}
    for sequence in sorted(live, key=lambda s: s.arrival):
        scheduler.add(sequence)
    memory: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset): the whole prefix that made this entry
    while live:
        plan = scheduler.schedule()
        for sequence, count in [(s, 1) for s in plan.decodes] + plan.prefills:
            for position in range(sequence.num_computed, sequence.num_computed + count):
                place = (sequence.blocks[position // 4], position % 4)
                memory[place] = tuple(sequence.token_ids[: position + 1])
        sampled = plan.sampled()
        scheduler.advance(plan)
        for sequence in sampled:
            for position in range(sequence.num_computed):
                place = (sequence.blocks[position // 4], position % 4)
                assert memory[place] == tuple(sequence.token_ids[: position + 1])
            if sequence.append(next_token(sequence)) is FinishReason.LENGTH:
                scheduler.remove(sequence)
                live.remove(sequence)
        scheduler.check()
