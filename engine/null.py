"""An engine without a model: it answers with a given text, one token a sequence and step.

It shows what the front end alone can do, and it scripts exact outputs for tests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs

NULL_TEXT = (
    " The answer took a while to arrive, and when it did nobody in the room had expected it to be so short. "
    "Outside, the harbour lay still; a crane turned, a gull complained, and the last ferry of the evening drew a "
    "white line across the water. She folded the letter twice, put it back between the pages of the atlas and said "
    "that some questions are better asked of maps than of people. “Perhaps,” he answered, “but a map never changes "
    "its mind.” They walked down to the pier, where 12 lamps out of 30 still worked, and counted the boats."
)


def scripted_logprobs(script: Sequence[int], at: int, count: int) -> TokenLogprobs:
    """Return certainty of the token at `at` of the endless script; the next ones each seem e times less likely."""
    tops = [script[(at + k) % len(script)] for k in range(count)]
    return TokenLogprobs(script[at % len(script)], 0.0, 1, tops, [-float(k) for k in range(count)])


class NullStepper:
    """Emits `script` from its start, over and over, to each of up to `max_num_seqs` running requests.

    A request for which `script_of` returns tokens gets these in its place, once, and then stops.
    It chooses nothing, so sampling parameters and grammars have no effect on it.
    """

    def __init__(
        self,
        script: Sequence[int],
        *,
        max_num_seqs: int,
        max_model_len: int,
        step_ms: float = 0.0,
        script_of: Callable[[GenerationRequest], Sequence[int] | None] | None = None,
    ) -> None:
        self._script_of = script_of
        self._ids = list(script)
        self._script = [(token_id,) for token_id in script]  # made once: events share these tuples
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._step_s = step_ms / 1e3
        self._next_step = 0.0
        self._waiting: dict[GenerationRequest, None] = {}  # in the order of arrival
        self._running: dict[GenerationRequest, Iterator[TokenEvent]] = {}
        self._ended: list[GenerationRequest] = []  # in this step

    def add(self, request: GenerationRequest) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > self._max_model_len:
            raise InvalidRequestError(f"The engine holds {self._max_model_len} tokens a sequence.")
        self._waiting[request] = None

    def cancel(self, request: GenerationRequest) -> None:
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    def step(self) -> list[TokenEvent]:
        self._pace()
        running, waiting = self._running, self._waiting
        while waiting and len(running) < self._max_num_seqs:
            request = next(iter(waiting))
            del waiting[request]
            request.times.scheduled = time.monotonic()
            sampling = request.sampling
            own = self._script_of(request) if self._script_of is not None else None
            if own is not None:
                running[request] = self._recite(request, own)
                continue
            is_plain = sampling.num_logprobs is None and sampling.num_prompt_logprobs is None
            running[request] = self._generate(request) if is_plain else self._score(request)
        events = [next(sequence) for sequence in running.values()]
        for request in self._ended:
            request.times.finished = time.monotonic()
            del running[request]
        self._ended.clear()
        return events

    def _generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Yield the events of one sequence; a generator, since its locals are the cheapest state there is."""
        script = itertools.cycle(self._script)
        stop_ids = request.sampling.stop_token_ids
        request.times.first_token = time.monotonic()
        for _ in range(request.sampling.max_tokens - 1):
            token_ids = next(script)
            if stop_ids and token_ids[0] in stop_ids:
                break
            yield TokenEvent(request, token_ids)
        else:
            token_ids = next(script)
        self._ended.append(request)
        if token_ids[0] in stop_ids:
            yield TokenEvent(request, token_ids, FinishReason.STOP, token_ids[0])
        else:
            yield TokenEvent(request, token_ids, FinishReason.LENGTH)

    def _recite(self, request: GenerationRequest, script: Sequence[int]) -> Iterator[TokenEvent]:
        """Yield the events of a sequence that has a script of its own."""
        count = request.sampling.num_logprobs
        request.times.first_token = time.monotonic()
        for at, token_id in enumerate(script[: request.sampling.max_tokens]):
            scores = (scripted_logprobs(script, at, count),) if count is not None else None
            yield TokenEvent(request, (token_id,), logprobs=scores)
        self._ended.append(request)
        is_cut = len(script) > request.sampling.max_tokens
        yield TokenEvent(request, (), FinishReason.LENGTH if is_cut else FinishReason.STOP)

    def _score(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Yield the events of a sequence whose tokens' probabilities are wanted."""
        sampling = request.sampling
        for at, event in enumerate(self._generate(request)):
            if sampling.num_logprobs is not None:
                event.logprobs = (scripted_logprobs(self._ids, at, sampling.num_logprobs),)
            if at == 0 and sampling.num_prompt_logprobs is not None:
                prompt, count = request.prompt_ids, sampling.num_prompt_logprobs
                event.prompt_logprobs = [None, *(scripted_logprobs(prompt, k, count) for k in range(1, len(prompt)))]
            yield event

    def _pace(self) -> None:
        if self._step_s:
            now = time.monotonic()
            if self._next_step > now:
                time.sleep(self._next_step - now)
            self._next_step = max(self._next_step, now) + self._step_s

    def num_running(self) -> int:
        return len(self._running)

    def num_waiting(self) -> int:
        return len(self._waiting)

    def kv_usage(self) -> float:
        return 0.0

    def device_seconds(self) -> float:
        return 0.0

    def describe(self) -> dict[str, str]:
        return {"device": "none", "dtype": "none", "kv_capacity_tokens": "unbounded"}

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()
