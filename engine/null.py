"""An engine without a model: it answers with a given text, one token a sequence and step.

It shows what the front end alone can do, and it scripts exact outputs for tests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent

NULL_TEXT = (
    " The answer took a while to arrive, and when it did nobody in the room had expected it to be so short. "
    "Outside, the harbour lay still; a crane turned, a gull complained, and the last ferry of the evening drew a "
    "white line across the water. She folded the letter twice, put it back between the pages of the atlas and said "
    "that some questions are better asked of maps than of people. “Perhaps,” he answered, “but a map never changes "
    "its mind.” They walked down to the pier, where 12 lamps out of 30 still worked, and counted the boats."
)


class _Sequence:
    __slots__ = ("made", "request", "wanted")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.wanted = request.sampling.max_tokens
        self.made = 0


class NullStepper:
    """Emits `script` from its start, over and over, to each of up to `max_num_seqs` running requests."""

    def __init__(self, script: Sequence[int], *, max_num_seqs: int, max_model_len: int, step_ms: float = 0.0) -> None:
        self._script = [(token_id,) for token_id in script]  # made once: events share these tuples
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._step_s = step_ms / 1e3
        self._next_step = 0.0
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[GenerationRequest, _Sequence] = {}

    def add(self, request: GenerationRequest) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > self._max_model_len:
            raise InvalidRequestError(f"The engine holds {self._max_model_len} tokens a sequence.")
        self._waiting.append(_Sequence(request))

    def cancel(self, request: GenerationRequest) -> None:
        if self._running.pop(request, None) is None:
            self._waiting = deque(s for s in self._waiting if s.request is not request)

    def step(self) -> list[TokenEvent]:
        self._pace()
        running, waiting, script = self._running, self._waiting, self._script
        while waiting and len(running) < self._max_num_seqs:
            sequence = waiting.popleft()
            sequence.request.times.scheduled = time.monotonic()
            running[sequence.request] = sequence
        events, ended, length = [], [], len(script)
        for request, sequence in running.items():
            made = sequence.made
            token = script[made % length]
            sequence.made = made = made + 1
            event = TokenEvent(request, token)
            if made == 1:
                request.times.first_token = time.monotonic()
            if request.sampling.stop_token_ids and token[0] in request.sampling.stop_token_ids:
                event.finish_reason, event.stop_token_id = FinishReason.STOP, token[0]
                ended.append(request)
            elif made == sequence.wanted:
                event.finish_reason = FinishReason.LENGTH
                ended.append(request)
            events.append(event)
        for request in ended:
            request.times.finished = time.monotonic()
            del running[request]
        return events

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

    def describe(self) -> dict[str, str]:
        return {"device": "none", "dtype": "none", "kv_capacity_tokens": "unbounded"}

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()
