"""Which sequences the next step works on, and how many tokens of each.

One step holds a decode token of every sequence that is that far, and after them chunks of prompts up to a budget, so
that a long prompt delays running streams by one chunk at most. Sequences are served in the order of (priority,
arrival); when the blocks run out the last of them is preempted: it gives its blocks back, waits again at its old
place, and computes its tokens anew.

A step may be planned before the tokens of the last one were read. A sequence decodes all the same, unless that token
is the last it may have; but it is not preempted, and who needs its blocks waits for one step.

Admission takes the blocks of all tokens that a sequence has by then, so a prompt that was begun can be finished; and a
sequence that could not finish alone on an empty device is refused by `can_ever_fit`. Together: the first in the order
always advances, so every sequence ends.

Engine thread only. No torch.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ftserve.engine.blocks import BlockPool, BlockStatistics, hash_block
from ftserve.engine.encoder_cache import EncoderCache, EncoderStatistics
from ftserve.engine.media import MediaUnit
from ftserve.engine.sequence import Sequence, SequenceState

_KEY = attrgetter("key")


class ScoredChunk(NamedTuple):
    """Prompt tokens of a sequence, from `start` on: a step tells how likely each was."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """The work of one step: the flat batch is one token of each of `decodes`, then the chunks of `prefills`."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, tokens of its chunk)
    regrown: list[Sequence] = field(default_factory=list)  # whose `blocks` or `slot` changed since their last step
    encodes: list[MediaUnit] = field(default_factory=list)  # what the vision tower has to do first
    drops: list[bytes] = field(default_factory=list)  # names of units whose embeddings are kept no longer

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.prefills)

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get a token from this step, in the order of the flat batch."""
        return self.decodes + [s for s, count in self.prefills if count == s.num_pending]

    def scored(self) -> list[ScoredChunk]:
        """Return the chunks whose logits are wanted, as far as a prompt token follows."""
        return [
            ScoredChunk(s, s.num_computed + 1, min(count, s.prompt_len - 1 - s.num_computed))
            for s, count in self.prefills
            if s.scores_prompt
        ]


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts of sequences now, and of preemptions since the start."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    blocks: BlockStatistics
    encoder: EncoderStatistics | None = None


class Scheduler:
    """Holds every live sequence and plans steps for them."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        use_prefix_cache: bool = True,
        encoder: EncoderCache | None = None,
    ) -> None:
        """Plan for at most `max_num_seqs` sequences at once and `max_prefill_tokens` prompt tokens a step.

        Without an `encoder` placeholders are tokens like others.
        """
        if max_num_seqs < 1 or max_prefill_tokens < 1:
            raise ValueError(f"{max_num_seqs} sequences and {max_prefill_tokens} prefill tokens make no step")
        self.pool = pool
        self.running: list[Sequence] = []  # ascending by key
        self.waiting: list[Sequence] = []  # ascending by key
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens
        self._use_prefix_cache = use_prefix_cache
        self._encoder = encoder
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._num_preemptions = 0
        # Blocks that the last step fills with a token which is not read yet, by their index in the sequence.
        self._unnamed: list[tuple[Sequence, int]] = []

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Tell whether the empty device could finish `sequence`. Its last token is never computed."""
        return self.pool.blocks_for(sequence.max_len - 1) <= self.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `can_ever_fit`."""
        insort(self.waiting, sequence, key=_KEY)

    def remove(self, sequence: Sequence) -> None:
        """Forget a live sequence and free what it holds; full blocks stay findable."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.pool.release(sequence.blocks)
            self._strip(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.ENDED

    def discard(self, sequence: Sequence) -> list[int]:
        """Forget a running sequence whose keys and values are not to be trusted.

        Returns:
            Blocks that nobody holds now; the caller clears them before the next step.
        """
        self.running.remove(sequence)
        gone = self.pool.discard(sequence.blocks)
        self._strip(sequence)
        sequence.state = SequenceState.ENDED
        return gone

    def schedule(self) -> StepPlan:
        """Plan the next step, taking blocks for it."""
        plan = StepPlan()
        if self._encoder is not None:
            self._encoder.begin_step(plan.encodes, plan.drops)
        self._plan_decodes(plan)
        budget = self._plan_begun_prefills(plan, self._max_prefill_tokens)
        self._admit(plan, budget)
        return plan

    def abandon(self, plan: StepPlan) -> None:
        """Take note that a step failed before it was done."""
        if self._encoder is not None:
            self._encoder.forget(plan.encodes)

    def advance(self, plan: StepPlan) -> None:
        """Count the step's tokens as computed. To be called before its sampled tokens are appended."""
        block_size = self.pool.block_size
        for sequence in plan.decodes:
            sequence.num_computed = computed = sequence.num_computed + 1
            if computed % block_size == 0:
                if sequence.is_unread:
                    self._unnamed.append((sequence, computed // block_size - 1))
                else:
                    self._publish(sequence, computed - 1)
        for sequence, count in plan.prefills:
            sequence.num_computed += count
            self._publish(sequence, sequence.num_computed - count)

    def settle(self) -> None:
        """Take note that the tokens of all steps but the last were read. Called before the next one is planned."""
        for sequence, index in self._unnamed:
            if sequence.state is SequenceState.RUNNING:
                self._publish_block(sequence, index)
        self._unnamed.clear()

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            len(self.running),
            len(self.waiting),
            self._num_preemptions,
            self.pool.statistics(),
            None if self._encoder is None else self._encoder.statistics(),
        )

    def check(self) -> None:
        """Look for leaks.

        Raises:
            AssertionError: the books are wrong; the message has the numbers.
        """
        self.pool.check(sequence.blocks for sequence in self.running)
        slots = sorted(self._free_slots + [sequence.slot for sequence in self.running])
        assert slots == list(range(self._max_num_seqs)), f"slots leaked or shared: {slots}"
        for sequence in self.waiting:
            assert not sequence.blocks, f"waiting request {sequence.request.request_id} holds blocks"

    def _plan_decodes(self, plan: StepPlan) -> None:
        running, block_size = self.running, self.pool.block_size
        index = 0
        while index < len(running):  # preemption shortens the list from its end
            sequence = running[index]
            index += 1
            computed, length = sequence.num_computed, len(sequence.token_ids)
            if sequence.is_unread:
                length += 1
                if length >= sequence.max_len:  # that token was its last
                    continue
            if length - computed != 1 or computed < sequence.media_end:
                continue
            if computed == len(sequence.blocks) * block_size:
                if not self._make_room(sequence):
                    break
                sequence.blocks += self.pool.allocate(1)
                plan.regrown.append(sequence)
            plan.decodes.append(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt from the end until a block is free; False if `sequence` itself had to go, or cannot have one yet."""
        while not self.pool.num_free:
            last = self.running[-1]
            if last.is_unread:
                return False
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        self._strip(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self._num_preemptions += 1
        self.add(sequence)

    def _strip(self, sequence: Sequence) -> None:
        sequence.blocks = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _plan_begun_prefills(self, plan: StepPlan, budget: int) -> int:
        """Go on with prompts that have their blocks already; return what is left of `budget`."""
        for sequence in self.running:
            if budget == 0:
                break
            pending = sequence.num_pending
            if pending > 1 or sequence.num_computed < sequence.media_end:
                budget -= self._plan_chunk(plan, sequence, min(pending, budget))
        return budget

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, count: int) -> int:
        """Plan the next `count` tokens of a prompt, or those before the first that waits for an image."""
        if self._encoder is not None and sequence.media_end:
            start = sequence.num_computed
            for unit in sequence.units_between(start, start + count):
                if not self._encoder.take(unit, is_first_use=unit.start >= start):
                    count = max(0, unit.start - start)
                    break
        if count:
            plan.prefills.append((sequence, count))
        return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences, strictly in order: one that does not fit is not overtaken."""
        while budget and self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            if not self._take_blocks(sequence):
                break
            del self.waiting[0]
            sequence.state = SequenceState.RUNNING
            sequence.slot = self._free_slots.pop()
            insort(self.running, sequence, key=_KEY)
            plan.regrown.append(sequence)
            budget -= self._plan_chunk(plan, sequence, min(sequence.num_pending, budget))

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give `sequence` the blocks of all its tokens, known ones first; False if it has to wait for some.

        One block per running sequence stays free, or the newcomer would soon be preempted by their growth.
        """
        pool = self.pool
        known = self._find_known(sequence)
        if self._is_on_its_way(sequence, len(known)):
            return False
        fresh = pool.blocks_for(len(sequence.token_ids)) - len(known)
        reserve = len(self.running)
        if fresh + pool.num_free_among(known) + reserve > pool.num_free:
            return False
        pool.hold(known)
        sequence.blocks = known + pool.allocate(fresh)
        sequence.num_computed = len(known) * pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed
        return True

    def _find_known(self, sequence: Sequence) -> list[int]:
        """Return known blocks of a prefix that leaves at least one token to compute: its logits are needed."""
        if not self._use_prefix_cache or sequence.scores_prompt:
            return []
        count = (len(sequence.token_ids) - 1) // self.pool.block_size
        return self.pool.find(self._name(sequence, index) for index in range(count))

    def _is_on_its_way(self, sequence: Sequence, num_known: int) -> bool:
        """Tell whether a running prompt will compute the next block that `sequence` needs.

        Waiting for it saves computing the same again where requests with one prefix come together, such as the choices
        of one request.
        """
        size = self.pool.block_size
        if num_known >= (len(sequence.token_ids) - 1) // size or not self._use_prefix_cache or sequence.scores_prompt:
            return False
        name = self._name(sequence, num_known)
        return any(
            other.num_pending > 1 and len(other.token_ids) // size > num_known and self._name(other, num_known) == name
            for other in self.running
        )

    def _publish(self, sequence: Sequence, computed_before: int) -> None:
        """Make the blocks findable that were filled since `computed_before` tokens were computed."""
        size = self.pool.block_size
        for index in range(computed_before // size, sequence.num_computed // size):
            self._publish_block(sequence, index)

    def _publish_block(self, sequence: Sequence, index: int) -> None:
        if self._use_prefix_cache:
            self.pool.publish(sequence.blocks[index], self._name(sequence, index))

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """Return the hash of a full block, computed when it is first asked for."""
        names, size = sequence.block_hashes, self.pool.block_size
        while len(names) <= index:
            start = len(names) * size
            parent = names[-1] if names else sequence.request.cache_salt
            media = b"".join(
                unit.name + (start - unit.start).to_bytes(8, signed=True)
                for unit in sequence.units_between(start, start + size)
            )
            names.append(hash_block(parent, sequence.token_ids[start : start + size], media))
        return names[index]
