"""What answers carry beyond OpenAI's, for requests that ask: token ids (`return_token_ids`) and `timings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftserve.engine.types import RequestTimes, Usage
from ftserve.server.rich import Token


@dataclass(frozen=True, slots=True)
class Extras:
    """What one request asked for, shared by its choices. Methods return JSON members behind a comma, or nothing."""

    prompts: Sequence[Sequence[int]]  # token ids; empty: no ids are shown
    num_choices: int  # of each prompt
    times: RequestTimes | None  # None: no timings are shown

    def prompt_ids(self, index: int) -> str:
        """Return the ids of the prompt that choice `index` answers."""
        return _ids("prompt_token_ids", self.prompts[index // self.num_choices]) if self.prompts else ""

    def token_ids(self, tokens: Sequence[Token], stop_token_id: int | None = None) -> str:
        """Return the ids of generated tokens, and of the one that ended them."""
        if not self.prompts:
            return ""
        ids = [token.token_id for token in tokens]
        return _ids("token_ids", ids if stop_token_id is None else [*ids, stop_token_id])

    def timings(self, usage: Usage) -> str:
        """Return the stages of a request in milliseconds, under llama.cpp's names where it has them."""
        times = self.times
        if times is None:
            return ""
        prompt_ms = 1e3 * (times.first_token - times.scheduled)
        predicted_ms = 1e3 * (times.finished - times.first_token)
        gaps = usage.completion_tokens - 1  # the first token is the prompt's
        per_second = 1e3 * gaps / predicted_ms if predicted_ms > 0 and gaps > 0 else 0.0
        return (
            f',"timings":{{"read_ms":{1e3 * (times.body_read - times.arrival):.3f},'
            f'"preprocess_ms":{1e3 * (times.submitted - times.body_read):.3f},'
            f'"queue_ms":{1e3 * (times.scheduled - times.submitted):.3f},'
            f'"prompt_n":{usage.prompt_tokens},"cache_n":{usage.cached_tokens},"prompt_ms":{prompt_ms:.3f},'
            f'"predicted_n":{usage.completion_tokens},"predicted_ms":{predicted_ms:.3f},'
            f'"predicted_per_second":{per_second:.3f}}}'
        )


NOTHING = Extras((), 1, None)


def _ids(name: str, ids: Sequence[int]) -> str:
    return f',"{name}":[{",".join(map(str, ids))}]'
