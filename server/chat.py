"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import Usage
from ftserve.preprocess.vocabulary import json_escape
from ftserve.server.choice import ChoiceEnd
from ftserve.server.dialect import Dialect
from ftserve.server.exchange import Exchange
from ftserve.server.extras import NOTHING
from ftserve.server.generation import GenerationWorker, Job, Prepared
from ftserve.server.logprobs import Scores
from ftserve.server.messages import for_template
from ftserve.server.problems import Problem, problem_of
from ftserve.server.reply import DONE, usage_json
from ftserve.server.rich import Delta, Kind, Message, RichOptions
from ftserve.server.tools import CallPlan, with_tools
from ftserve.server.wire import ChatRequest, parse, text_of


def prepare_chat(worker: GenerationWorker, exchange: Exchange) -> Prepared | None:
    """Turn a chat body into one prompt. Preprocess thread."""
    return prepare_parsed_chat(worker, exchange, parse(ChatRequest, exchange.take_body()))


def parse_chat(exchange: Exchange, resume: Callable[[Job], None]) -> None:
    """Parse a large body and hand the request on, so that no preprocess thread is held up. Intake thread."""
    try:
        fields = parse(ChatRequest, exchange.take_body())
    except InvalidRequestError as exc:
        exchange.refuse(problem_of(exc))
        return
    resume(Job(exchange, partial(prepare_parsed_chat, fields=fields)))


def prepare_parsed_chat(
    worker: GenerationWorker,
    exchange: Exchange,
    fields: ChatRequest,
    dress: Callable[[Prepared], Prepared] = lambda prepared: prepared,
) -> Prepared | None:
    """Turn a chat request into one prompt; None if it is left to wait for its images. Preprocess thread.

    `dress` may change how the request is answered.
    """
    worker.check_model(fields.model)
    media = worker.media
    if media is None:
        return dress(_prompt(worker, exchange, fields, text_of(fields.messages)))
    messages, gathering = media.take(fields, exchange)
    if gathering is None:
        return dress(_prompt(worker, exchange, fields, messages))
    try:
        prepared = dress(_prompt(worker, exchange, fields, messages))
    except BaseException:
        gathering.cancel()
        raise

    def finish(_worker: GenerationWorker, exchange: Exchange) -> Prepared:
        prompt, spans = media.show(prepared.prompts[0], gathering)
        exchange.times.media_ready = time.monotonic()
        return replace(prepared, prompts=[prompt], media=spans)

    gathering.when_over(lambda: worker.resume(Job(exchange, finish)))
    return None


def _prompt(
    worker: GenerationWorker, exchange: Exchange, fields: ChatRequest, messages: Sequence[dict[str, Any]]
) -> Prepared:
    times = exchange.times
    times.validated = time.monotonic()
    dialect = worker.model.dialect
    plan = CallPlan.of(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls is not False)
    messages = for_template(messages, dialect.traits)
    if plan is not None and not dialect.traits.shows_tools:
        messages = with_tools(messages, plan.definitions)
    text = worker.render(messages, fields, plan.definitions if plan is not None else None)
    times.templated = time.monotonic()
    prompt = worker.tokenize(text, add_special_tokens=bool(fields.add_special_tokens))
    times.tokenized = time.monotonic()
    max_tokens = fields.max_completion_tokens if fields.max_tokens is None else fields.max_tokens
    scores = worker.scores(fields)
    reply_format = ChatFormat(exchange.request_id, worker.model.name, include_usage=fields.wants_usage(), scores=scores)
    return Prepared(
        fields,
        [prompt],
        max_tokens,
        reply_format,
        rich=_rich_options(dialect, text, plan, keeps_tokens=scores is not None),
        make_grammar=plan.grammar if plan is not None else None,
        thought_end=dialect.thought_end(text),
    )


def _rich_options(dialect: Dialect, prompt: str, plan: CallPlan | None, *, keeps_tokens: bool) -> RichOptions | None:
    """Return what the answers carry besides text; None if it is nothing."""
    if plan is not None and plan.is_forced and dialect.is_harmony:
        raise InvalidRequestError("This model's calls cannot be forced; use 'auto'.", param="tool_choice")
    make_parser = dialect.parser(prompt, plan)
    if make_parser is None and not keeps_tokens:
        return None
    return RichOptions(
        make_parser,
        dialect.tools.make_call_id,
        max_calls=plan.max_calls if plan is not None else None,
        is_call_forced=plan is not None and plan.forced_name is not None,
        keeps_tokens=keeps_tokens,
    )


class ChatFormat:
    """Chat completion objects and chunks, put together from parts that are built once a request."""

    done = DONE

    __slots__ = ("_chunk_head", "_chunk_tail", "_head", "_include_usage", "_prompt_logprobs", "_scores", "extras")

    def __init__(self, request_id: str, model: str, *, include_usage: bool, scores: Scores | None = None) -> None:
        self.extras = NOTHING
        self._scores = scores
        self._include_usage = include_usage
        self._prompt_logprobs = ""  # a member of the whole answer, found with its first choice
        self._head = (
            f'"id":"chatcmpl-{json_escape(request_id)}","created":{int(time.time())},"model":"{json_escape(model)}"'
        )
        self._chunk_head = f'data: {{{self._head},"object":"chat.completion.chunk"'
        self._chunk_tail = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def opening(self, index: int) -> str:
        first = f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"finish_reason":null}}'
        return self._chunk(first, self.extras.prompt_ids(index))

    def delta(self, index: int) -> tuple[str, str]:
        return (
            f'{self._chunk_head},"choices":[{{"index":{index},"delta":{{"content":"',
            f'"}},"finish_reason":null}}]{self._chunk_tail}',
        )

    def closing(self, index: int, end: ChoiceEnd) -> str:
        ids = "" if end.stop_token_id is None else self.extras.token_ids((), end.stop_token_id)
        return self._chunk(f'{{"index":{index},"delta":{{}},{_end_json(end)}{ids}}}')

    def last(self, usage: Usage) -> str:
        counts = f',"usage":{usage_json(usage)}' if self._include_usage else ""
        return f'{self._chunk_head},"choices":[]{counts}{self.extras.timings(usage)}}}\n\n'

    def failure(self, problem: Problem) -> str:
        return f"data: {problem.body()}\n\n"

    def rich_delta(self, index: int, delta: Delta) -> str:
        scores = "" if self._scores is None else f'"logprobs":{self._scores.of_chat(delta.tokens)},'
        ids = self.extras.token_ids(delta.tokens)
        return self._chunk(f'{{"index":{index},"delta":{{{_delta_json(delta)}}},{scores}"finish_reason":null{ids}}}')

    def choice(self, index: int, escaped: str, end: ChoiceEnd) -> str:
        return (
            f'{{"index":{index},"message":{{"role":"assistant","content":"{escaped}","refusal":null}},'
            f'"logprobs":null,{_end_json(end)}}}'
        )

    def rich_choice(self, index: int, message: Message, end: ChoiceEnd) -> str:
        scores = "null"
        if self._scores is not None:
            scores = self._scores.of_chat(message.tokens)
            if index == 0 and self._scores.num_prompt_top is not None:
                self._prompt_logprobs = f',"prompt_logprobs":{self._scores.of_prompt(message.prompt_logprobs)}'
        ids = self.extras.token_ids(message.tokens, end.stop_token_id)
        return f'{{"index":{index},"message":{{{_message_json(message)}}},"logprobs":{scores},{_end_json(end)}{ids}}}'

    def whole(self, choices: Sequence[str], usage: Usage) -> str:
        return (
            f'{{{self._head},"object":"chat.completion","choices":[{",".join(choices)}],"usage":{usage_json(usage)}'
            f"{self._prompt_logprobs}{self.extras.prompt_ids(0)}{self.extras.timings(usage)}}}"
        )

    def _chunk(self, choice: str, more: str = "") -> str:
        return f'{self._chunk_head},"choices":[{choice}]{more}{self._chunk_tail}'


def _end_json(end: ChoiceEnd) -> str:
    return f'"finish_reason":{end.finish_reason},"stop_reason":{end.stop_reason}'


def _delta_json(delta: Delta) -> str:
    """Return the members of a chunk's `delta`."""
    text = json_escape(delta.text)
    match delta.kind:
        case Kind.CONTENT:
            return f'"content":"{text}"'
        case Kind.REASONING:
            return _reasoning_json(text)
        case Kind.CALL:
            call = f'"id":"{delta.call_id}","type":"function","function":{{"name":"{text}","arguments":""}}'
        case Kind.ARGUMENTS:
            call = f'"function":{{"arguments":"{text}"}}'
    return f'"tool_calls":[{{"index":{delta.call_index},{call}}}]'


def _message_json(message: Message) -> str:
    """Return the members of a whole `message`; what is not there is left out, but for `content`."""
    content = f'"{json_escape(message.content)}"' if message.content or not message.calls else "null"
    members = [f'"role":"assistant","content":{content},"refusal":null']
    if message.reasoning:
        members.append(_reasoning_json(json_escape(message.reasoning)))
    if message.calls:
        calls = [
            f'{{"id":"{call.call_id}","type":"function","function":'
            f'{{"name":"{json_escape(call.name)}","arguments":"{json_escape(call.arguments)}"}}}}'
            for call in message.calls
        ]
        members.append(f'"tool_calls":[{",".join(calls)}]')
    return ",".join(members)


def _reasoning_json(escaped: str) -> str:
    """Return the thought under both of the names that clients look for."""
    return f'"reasoning_content":"{escaped}","reasoning":"{escaped}"'
