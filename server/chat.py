"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ftserve.engine.types import Usage
from ftserve.preprocess.vocabulary import json_escape
from ftserve.server.choice import ChoiceEnd
from ftserve.server.exchange import Exchange
from ftserve.server.generation import GenerationWorker, Prepared
from ftserve.server.reply import usage_json
from ftserve.server.wire import ChatRequest, parse, text_of


def prepare_chat(worker: GenerationWorker, exchange: Exchange) -> Prepared:
    """Turn a chat body into one prompt. Preprocess thread."""
    times = exchange.times
    fields = parse(ChatRequest, exchange.take_body())
    worker.check_model(fields.model)
    messages = text_of(fields.messages)
    times.validated = time.monotonic()
    text = worker.render(messages, fields.add_generation_prompt is not False, fields.chat_template_kwargs)
    times.templated = time.monotonic()
    prompt = worker.tokenize(text, add_special_tokens=False)  # the template has written the special tokens itself
    times.tokenized = time.monotonic()
    max_tokens = fields.max_completion_tokens if fields.max_tokens is None else fields.max_tokens
    reply_format = ChatFormat(exchange.request_id, worker.model.name, include_usage=fields.wants_usage())
    return Prepared(fields, [prompt], max_tokens, reply_format)


class ChatFormat:
    """Chat completion objects and chunks, put together from parts that are built once a request."""

    __slots__ = ("_chunk_head", "_chunk_tail", "_head")

    def __init__(self, request_id: str, model: str, *, include_usage: bool) -> None:
        self._head = (
            f'"id":"chatcmpl-{json_escape(request_id)}","created":{int(time.time())},"model":"{json_escape(model)}"'
        )
        self._chunk_head = f'data: {{{self._head},"object":"chat.completion.chunk"'
        self._chunk_tail = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def opening(self, index: int) -> str:
        return self._chunk(f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"finish_reason":null}}')

    def delta(self, index: int) -> tuple[str, str]:
        return (
            f'{self._chunk_head},"choices":[{{"index":{index},"delta":{{"content":"',
            f'"}},"finish_reason":null}}]{self._chunk_tail}',
        )

    def closing(self, index: int, end: ChoiceEnd) -> str:
        return self._chunk(f'{{"index":{index},"delta":{{}},{_end_json(end)}}}')

    def usage(self, usage: Usage) -> str:
        return f'{self._chunk_head},"choices":[],"usage":{usage_json(usage)}}}\n\n'

    def whole(self, choices: Sequence[tuple[str, ChoiceEnd]], usage: Usage) -> str:
        parts = [
            f'{{"index":{k},"message":{{"role":"assistant","content":"{text}","refusal":null}},'
            f'"logprobs":null,{_end_json(end)}}}'
            for k, (text, end) in enumerate(choices)
        ]
        return f'{{{self._head},"object":"chat.completion","choices":[{",".join(parts)}],"usage":{usage_json(usage)}}}'

    def _chunk(self, choice: str) -> str:
        return f'{self._chunk_head},"choices":[{choice}]{self._chunk_tail}'


def _end_json(end: ChoiceEnd) -> str:
    return f'"finish_reason":{end.finish_reason},"stop_reason":{end.stop_reason}'
