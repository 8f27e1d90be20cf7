"""Continuous batching: schedule, run, sample, hand out. Engine thread only.

A device that works behind our back, as CUDA does, is given its next step before the tokens of the last one are read, so
that it never waits for us: they stay on the device as that step's input. In the order of one `step`:

    plan step k · queue its model run · read the tokens of step k-1 · queue the sampling of step k · return k-1's events

Sampling comes after the reading since masks of grammars, bad words and penalties are made from the tokens before;
the device is busy with the model meanwhile. A sequence that turns out to have ended is one step too long in the queue,
and what comes of that is dropped. Its blocks may be given away at once: the device does one thing after another.

No torch: what the runner returns goes to the sampler as it is, so that a device which only keeps time does without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from ftserve.engine.errors import EngineRequestError, FtserveError, InvalidRequestError, RequestTooLongError
from ftserve.engine.media import MediaPreparer, PromptMedia
from ftserve.engine.scheduler import Scheduler, SchedulerStatistics, ScoredChunk, StepPlan
from ftserve.engine.sequence import Sequence, SequenceState
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs

log = logging.getLogger("ftserve.engine")

L = TypeVar("L")
L_co = TypeVar("L_co", covariant=True)
L_contra = TypeVar("L_contra", contravariant=True)
R = TypeVar("R", bound="Reading")
R_co = TypeVar("R_co", bound="Reading", covariant=True)
R_contra = TypeVar("R_contra", bound="Reading", contravariant=True)


class Runner(Protocol[L_co, R_contra]):
    """What computes logits; `ModelRunner`, or something without a model."""

    def run(self, plan: StepPlan, unread: R_contra | None) -> L_co:
        """Return logits: a row for each of `plan.sampled()`, then those of `plan.scored()`.

        `unread` has the last tokens of those sequences that are `is_unread`, each at its `row`.

        Raises:
            MemoryError: the device has not enough memory for this step.
        """

    def clear(self, blocks: list[int]) -> None:
        """Make blocks harmless that hold values which are no numbers."""


class Sampled(NamedTuple):
    """What a sampler made of one step."""

    tokens: list[int | None]  # one for each sequence; None where its logits are no numbers
    logprobs: Mapping[int, TokenLogprobs] = {}  # by place in the batch, of those who asked
    failures: Mapping[int, FtserveError] = {}  # by place in the batch: why there is no token, where it is the request's


class Reading(Protocol):
    """A step's results, which the device may not have yet."""

    def read(self) -> Sampled:
        """Wait for the device and return them, once. `prompt_logprobs` of the scored sequences have grown then."""


class TokenSampler(Protocol[L_contra, R_co]):
    """What chooses tokens from a runner's logits."""

    def prepare(self, sequences: list[Sequence]) -> None:
        """Begin, before the device does, what `sample` will need for these sequences."""

    def sample(self, logits: L_contra, sequences: list[Sequence], scored: list[ScoredChunk]) -> R_co:
        """Choose a token for each sequence, and look at how likely the prompt tokens of `plan.scored()` were."""

    def close(self) -> None:
        """Release what was taken."""


@dataclass(frozen=True, slots=True)
class Flight(Generic[R]):
    """A step that the device has been given."""

    sequences: list[Sequence]  # that get a token from it
    reading: R
    began: float  # time.monotonic()


class ContinuousBatcher(Generic[L, R]):
    """A `Stepper` out of a scheduler, a runner and a sampler."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[L, R],
        sampler: TokenSampler[L, R],
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        media: MediaPreparer | None = None,
        is_asynchronous: bool = False,
    ) -> None:
        """Take the parts; without `media` requests that show any are refused.

        `is_asynchronous`: queue a step before the tokens of the one before it are read.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._is_asynchronous = is_asynchronous
        self._flight: Flight[R] | None = None  # queued and not read yet
        self._landed_at = 0.0  # time.monotonic()
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_ids = eos_token_ids
        self._media = media
        self._sequences: dict[GenerationRequest, Sequence] = {}
        self._arrivals = 0
        self._device_s = 0.0

    def add(self, request: GenerationRequest) -> None:
        self._refuse_impossible(request)
        sequence = Sequence(
            request,
            arrival=self._arrivals,
            eos_ids=self._eos_ids,
            max_model_len=self._max_model_len,
            media=self._prepare_media(request) if request.media else None,
        )
        if not self.scheduler.can_ever_fit(sequence):
            raise RequestTooLongError(
                f"The KV cache holds {self.scheduler.pool.num_blocks * self.scheduler.pool.block_size} tokens; "
                f"this request needs {sequence.max_len - 1}.",
                param="max_tokens",
            )
        self._arrivals += 1
        self._sequences[request] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request: GenerationRequest) -> None:
        self.scheduler.remove(self._sequences.pop(request))

    def step(self) -> list[TokenEvent]:
        plan = self.scheduler.schedule()
        before, self._flight = self._flight, None
        if plan.is_empty:
            return self._land(before)
        began = self._stamp_scheduled(plan)
        sampled, scored = plan.sampled(), plan.scored()
        if before is None:
            self._sampler.prepare(sampled)
        try:
            logits = self._runner.run(plan, None if before is None else before.reading)
        except MemoryError as exc:
            self.scheduler.abandon(plan)
            events = self._land(before)
            if not plan.prefills:
                raise
            return [*events, self._blame(plan, exc)]
        self.scheduler.advance(plan)
        events = self._land(before)
        if before is not None:
            self._sampler.prepare(sampled)
        flight = Flight(sampled, self._sampler.sample(logits, sampled, scored), began)
        if not self._is_asynchronous:
            return self._land(flight)
        for row, sequence in enumerate(sampled):
            sequence.is_unread, sequence.row = True, row
        self._flight = flight
        return events

    def num_running(self) -> int:
        return len(self.scheduler.running)

    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def kv_usage(self) -> float:
        pool = self.scheduler.pool
        return 1.0 - pool.num_free / pool.num_blocks

    def device_seconds(self) -> float:
        return self._device_s

    def describe(self) -> dict[str, str]:
        pool = self.scheduler.pool
        return {"device": "none", "dtype": "none", "kv_capacity_tokens": str(pool.num_blocks * pool.block_size)}

    def statistics(self) -> SchedulerStatistics:
        return self.scheduler.statistics()

    def close(self) -> None:
        for sequence in self._sequences.values():
            self.scheduler.remove(sequence)
        self._sequences.clear()
        self._sampler.close()

    def _refuse_impossible(self, request: GenerationRequest) -> None:
        prompt, limit = request.prompt_ids, self._max_model_len
        if not prompt:
            raise InvalidRequestError("The prompt has no tokens.", param="prompt")
        if len(prompt) >= limit:
            raise RequestTooLongError(
                f"The prompt has {len(prompt)} tokens; with at least one more it must fit into {limit}.", param="prompt"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise InvalidRequestError(f"A token id is not in 0 to {self._vocab_size - 1}.", param="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1.", param="max_tokens")

    def _prepare_media(self, request: GenerationRequest) -> PromptMedia:
        if self._media is None:
            raise InvalidRequestError("This model takes no images or video.", param="messages")
        return self._media.prepare(request)

    def _stamp_scheduled(self, plan: StepPlan) -> float:
        now = time.monotonic()
        for sequence, _ in plan.prefills:
            times = sequence.request.times
            if not times.scheduled:
                times.scheduled = now
        return now

    def _land(self, flight: Flight[R] | None) -> list[TokenEvent]:
        """Read what a step has brought, give each sequence its token and return the events, in their order."""
        if flight is None:
            return []
        sampled = flight.reading.read()
        now = time.monotonic()
        self._device_s += now - max(flight.began, self._landed_at)
        self._landed_at = now
        events = self._commit(flight.sequences, sampled, now)
        self.scheduler.settle()
        return events

    def _commit(self, sequences: list[Sequence], sampled: Sampled, now: float) -> list[TokenEvent]:
        events = []
        for row, (sequence, token) in enumerate(zip(sequences, sampled.tokens, strict=True)):
            if sequence.state is SequenceState.ENDED:  # while the device worked
                continue
            sequence.is_unread = False
            request = sequence.request
            if token is None:
                events.append(self._end_without_token(sequence, sampled.failures.get(row)))
                continue
            reason = sequence.append(token)
            event = TokenEvent(request, (token,))
            if (logprobs := sampled.logprobs.get(row)) is not None:
                event.logprobs = (logprobs,)
            if sequence.output_len == 1:
                request.times.first_token = now
                event.num_cached_tokens = sequence.num_cached
                event.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            if reason is not None:
                event.finish_reason = reason
                if reason is FinishReason.STOP:
                    event.stop_token_id = token
                request.times.finished = now
                del self._sequences[request]
                self.scheduler.remove(sequence)
            events.append(event)
        return events

    def _blame(self, plan: StepPlan, cause: Exception) -> TokenEvent:
        """End one prompt of a step that ran out of memory, the others are planned again.

        It is the one with most to encode in this step, and where nothing was, with the longest context.
        """
        encoded = {unit.name for unit in plan.encodes}

        def size(chunk: tuple[Sequence, int]) -> tuple[int, int]:
            sequence, end = chunk[0], chunk[0].num_computed + chunk[1]
            units = sequence.units_between(sequence.num_computed, end)
            return sum(unit.num_tokens for unit in units if unit.name in encoded), end

        largest, _ = max(plan.prefills, key=size)
        error = EngineRequestError("The device has not enough memory for this prompt.")
        error.__cause__ = cause
        return self._fail(largest, error)

    def _end_without_token(self, sequence: Sequence, failure: FtserveError | None) -> TokenEvent:
        """End one sequence for which no token could be chosen."""
        if failure is None:
            return self._fail(sequence, EngineRequestError("The model's output is not a number."))
        log.warning("request %s ends without a token: %s", sequence.request.request_id, failure)
        del self._sequences[sequence.request]
        self.scheduler.remove(sequence)  # nothing is wrong with what it computed
        sequence.request.times.finished = time.monotonic()
        return TokenEvent(sequence.request, (), FinishReason.ERROR, error=failure)

    def _fail(self, sequence: Sequence, error: EngineRequestError) -> TokenEvent:
        """End one running sequence with an error, and wipe what it left in the cache."""
        request = sequence.request
        log.error("request %s failed in the engine: %s", request.request_id, error)
        del self._sequences[request]
        gone = self.scheduler.discard(sequence)
        if gone:
            self._runner.clear(gone)
        request.times.finished = time.monotonic()
        return TokenEvent(request, (), FinishReason.ERROR, error=error)
