"""`POST /v1/completions`."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from ftserve.engine.types import TokenEvent, Usage
from ftserve.preprocess.vocabulary import json_escape
from ftserve.server.choice import ChoiceEnd
from ftserve.server.exchange import Exchange
from ftserve.server.extras import NOTHING
from ftserve.server.generation import GenerationWorker, Prepared
from ftserve.server.logprobs import Scores, prompt_tokens
from ftserve.server.problems import Problem
from ftserve.server.prompts import token_ids_of
from ftserve.server.reply import DONE, usage_json
from ftserve.server.rich import Delta, Message, RichOptions, Token
from ftserve.server.wire import CompletionRequest, parse

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def prepare_completion(worker: GenerationWorker, exchange: Exchange) -> Prepared:
    """Turn a completion body into one or more prompts. Preprocess thread."""
    times = exchange.times
    fields = parse(CompletionRequest, exchange.take_body())
    worker.check_model(fields.model)
    times.validated = times.templated = time.monotonic()
    prompts = token_ids_of(
        fields.prompt, worker, add_special_tokens=fields.add_special_tokens is not False, param="prompt"
    )
    times.tokenized = time.monotonic()
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    scores = worker.scores(fields)
    reply_format = CompletionFormat(
        exchange.request_id, worker.model.name, include_usage=fields.wants_usage(), scores=scores
    )
    echoes = _echoes(fields.prompt, prompts, worker) if fields.echo else ()
    return Prepared(fields, prompts, max_tokens, reply_format, echoes, rich=_rich(fields, scores, echoes))


def _rich(fields: CompletionRequest, scores: Scores | None, echoes: Sequence[str]) -> RichOptions | None:
    if scores is None:
        return None
    n = fields.n or 1

    def echo(event: TokenEvent) -> list[Token]:
        request = event.request
        return prompt_tokens(request, event.prompt_logprobs or (), echoes[request.index // n], scores.texts)

    return RichOptions(keeps_tokens=True, echo=echo if echoes and fields.logprobs is not None else None)


def _echoes(prompt: object, prompts: list[array[int]], worker: GenerationWorker) -> list[str]:
    """Return each prompt's text: as it was given, or decoded."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        return prompt
    decode = worker.model.vocabulary.tokenizer.decode
    return [decode(ids.tolist(), skip_special_tokens=False) for ids in prompts]


class CompletionFormat:
    """Text completion objects and chunks."""

    done = DONE

    __slots__ = ("_chunk_tail", "_head", "_include_usage", "_scores", "extras")

    def __init__(self, request_id: str, model: str, *, include_usage: bool, scores: Scores | None = None) -> None:
        self.extras = NOTHING
        self._scores = scores
        self._include_usage = include_usage
        self._head = (
            f'"id":"cmpl-{json_escape(request_id)}","object":"text_completion",'
            f'"created":{int(time.time())},"model":"{json_escape(model)}"'
        )
        self._chunk_tail = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def opening(self, index: int) -> str:
        ids = self.extras.prompt_ids(index)
        return self._chunk(f'{{"index":{index},"text":"","logprobs":null,"finish_reason":null{ids}}}') if ids else ""

    def delta(self, index: int) -> tuple[str, str]:
        return (
            f'data: {{{self._head},"choices":[{{"index":{index},"text":"',
            f'","logprobs":null,"finish_reason":null}}]{self._chunk_tail}',
        )

    def closing(self, index: int, end: ChoiceEnd) -> str:
        ids = "" if end.stop_token_id is None else self.extras.token_ids((), end.stop_token_id)
        return self._chunk(_choice(index, "", end, more=ids))

    def last(self, usage: Usage) -> str:
        counts = f',"usage":{usage_json(usage)}' if self._include_usage else ""
        return f'data: {{{self._head},"choices":[]{counts}{self.extras.timings(usage)}}}\n\n'

    def failure(self, problem: Problem) -> str:
        return f"data: {problem.body()}\n\n"

    def rich_delta(self, index: int, delta: Delta) -> str:
        scores = "null" if self._scores is None else self._scores.of_completion(delta.tokens)
        ids = self.extras.token_ids(delta.tokens)
        text = json_escape(delta.text)
        return self._chunk(f'{{"index":{index},"text":"{text}","logprobs":{scores},"finish_reason":null{ids}}}')

    def choice(self, index: int, escaped: str, end: ChoiceEnd) -> str:
        return _choice(index, escaped, end)

    def rich_choice(self, index: int, message: Message, end: ChoiceEnd) -> str:
        scores = self._scores
        more = self.extras.token_ids(message.tokens, end.stop_token_id) + self.extras.prompt_ids(index)
        if scores is None:
            return _choice(index, json_escape(message.content), end, more=more)
        if scores.num_prompt_top is not None:
            more += f',"prompt_logprobs":{scores.of_prompt(message.prompt_logprobs)}'
        return _choice(index, json_escape(message.content), end, scores.of_completion(message.tokens), more)

    def whole(self, choices: Sequence[str], usage: Usage) -> str:
        more = self.extras.timings(usage)
        return f'{{{self._head},"choices":[{",".join(choices)}],"usage":{usage_json(usage)}{more}}}'

    def _chunk(self, choice: str) -> str:
        return f'data: {{{self._head},"choices":[{choice}]{self._chunk_tail}'


def _choice(index: int, escaped: str, end: ChoiceEnd, logprobs: str = "null", more: str = "") -> str:
    return (
        f'{{"index":{index},"text":"{escaped}","logprobs":{logprobs},'
        f'"finish_reason":{end.finish_reason},"stop_reason":{end.stop_reason}{more}}}'
    )
