"""`POST /inference/v1/generate`: tokens in, tokens out, as vLLM has it, for routers that do the rest."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from ftserve.engine.types import Usage
from ftserve.preprocess.tokens import ID_TYPECODE
from ftserve.preprocess.vocabulary import json_escape
from ftserve.server.choice import ChoiceEnd
from ftserve.server.exchange import Exchange
from ftserve.server.extras import NOTHING
from ftserve.server.generation import GenerationWorker, Prepared
from ftserve.server.logprobs import Scores
from ftserve.server.problems import Problem
from ftserve.server.prompts import check_ids
from ftserve.server.reply import DONE, usage_json
from ftserve.server.rich import Delta, Message, RichOptions, Token
from ftserve.server.wire import CacheSalt, GenerationFields, NumLogprobs, Priority, StreamOptions, TokenIds, parse

DEFAULT_MAX_TOKENS = 16  # vLLM's


class SampledFields(GenerationFields):
    """`sampling_params`: the fields of completions that say how to choose tokens and when to stop."""

    model: str = ""
    logprobs: NumLogprobs | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs


class GenerateRequest(BaseModel):
    """Body of `POST /inference/v1/generate`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    token_ids: TokenIds
    sampling_params: SampledFields
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = 0


def prepare_generate(worker: GenerationWorker, exchange: Exchange) -> Prepared:
    """Take the tokens of a body as the prompt. Preprocess thread."""
    times = exchange.times
    body = parse(GenerateRequest, exchange.take_body())
    if body.model is not None:
        worker.check_model(body.model)
    prompt = array(ID_TYPECODE, body.token_ids)
    check_ids(prompt, worker.model, param="token_ids")
    times.validated = times.templated = times.tokenized = time.monotonic()
    fields = body.sampling_params.model_copy(
        update={
            "stream": body.stream,
            "stream_options": body.stream_options,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
        }
    )
    scores = worker.scores(fields)
    request_id = exchange.request_id if body.request_id is None else body.request_id[:128]
    reply_format = GenerateFormat(request_id, scores=scores)
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    return Prepared(fields, [prompt], max_tokens, reply_format, rich=RichOptions(keeps_tokens=True))


class GenerateFormat:
    """Objects and chunks that hold token ids, and no text."""

    done = DONE

    __slots__ = ("_head", "_prompt_logprobs", "_scores", "extras")

    def __init__(self, request_id: str, *, scores: Scores | None) -> None:
        self.extras = NOTHING
        self._scores = scores
        self._prompt_logprobs = "null"  # found with the first choice
        self._head = f'"request_id":"{json_escape(request_id)}"'

    def opening(self, index: int) -> str:
        return ""

    def delta(self, index: int) -> tuple[str, str]:
        return "", ""  # every choice is rich

    def choice(self, index: int, escaped: str, end: ChoiceEnd) -> str:
        raise AssertionError("every choice is rich")

    def rich_delta(self, index: int, delta: Delta) -> str:
        return self._chunk(self._choice(index, delta.tokens, None, "null"))

    def closing(self, index: int, end: ChoiceEnd) -> str:
        return self._chunk(self._choice(index, (), end.stop_token_id, end.finish_reason))

    def rich_choice(self, index: int, message: Message, end: ChoiceEnd) -> str:
        if self._scores is not None and index == 0:
            self._prompt_logprobs = self._scores.of_prompt(message.prompt_logprobs)
        return self._choice(index, message.tokens, end.stop_token_id, end.finish_reason)

    def last(self, usage: Usage) -> str:
        return f'data: {{{self._head},"choices":[],"usage":{usage_json(usage)}{self.extras.timings(usage)}}}\n\n'

    def failure(self, problem: Problem) -> str:
        return f"data: {problem.body()}\n\n"

    def whole(self, choices: Sequence[str], usage: Usage) -> str:
        return (
            f'{{{self._head},"choices":[{",".join(choices)}],"prompt_logprobs":{self._prompt_logprobs},'
            f'"usage":{usage_json(usage)}{self.extras.timings(usage)}}}'
        )

    def _chunk(self, choice: str) -> str:
        return f'data: {{{self._head},"choices":[{choice}]}}\n\n'

    def _choice(self, index: int, tokens: Sequence[Token], stop_token_id: int | None, finish_reason: str) -> str:
        ids = [token.token_id for token in tokens]
        if stop_token_id is not None:
            ids.append(stop_token_id)
        scores = "null" if self._scores is None else self._scores.of_chat(tokens)
        return (
            f'{{"index":{index},"token_ids":[{",".join(map(str, ids))}],"logprobs":{scores},'
            f'"finish_reason":{finish_reason}}}'
        )
