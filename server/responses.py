"""`POST /v1/responses` and what can be asked of a response afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from random import getrandbits
from typing import Any

from ftserve.engine.errors import InvalidRequestError
from ftserve.server.chat import prepare_parsed_chat
from ftserve.server.exchange import Exchange
from ftserve.server.generation import GenerationWorker, Prepared
from ftserve.server.problems import JSON_HEADERS, HttpError
from ftserve.server.responses_format import ResponsesFormat
from ftserve.server.responses_shared import SharedResponseStore
from ftserve.server.responses_store import ResponseStore, Running
from ftserve.server.responses_wire import ResponsesRequest, messages_of
from ftserve.server.rich import RichOptions
from ftserve.server.wire import parse


class Responses:
    """The endpoint. Any thread; its state is the store."""

    def __init__(self, store: ResponseStore | SharedResponseStore) -> None:
        self.store = store

    def prepare(self, worker: GenerationWorker, exchange: Exchange) -> Prepared | None:
        """Turn a body into one prompt. Preprocess thread."""
        fields = parse(ResponsesRequest, exchange.take_body())
        before: Sequence[dict[str, Any]] = ()
        if fields.previous_response_id is not None:
            found = self.store.messages(fields.previous_response_id)
            if found is None:
                raise InvalidRequestError(
                    "There is no stored response of that id."
                    if self.store.keeps
                    else "This server keeps no responses; send the conversation as input.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = found
        chat_fields, chat = fields.to_chat(before)
        response_id = f"resp_{getrandbits(192):048x}"
        is_kept = fields.store is not False and self.store.keeps
        response = _begun(response_id, worker.model.name, fields, is_kept=is_kept)

        def finished(done: dict[str, Any]) -> None:
            self.store.end(response_id)  # before the client has the answer and may ask
            if is_kept:
                body = json.dumps(done, ensure_ascii=False)
                self.store.put(response_id, body, [*chat, *messages_of(done["output"])])

        def dress(prepared: Prepared) -> Prepared:
            reply_format = ResponsesFormat(response, finished)
            exchange.on_end(lambda: self.store.end(response_id))
            self.store.begin(response_id, Running(json.dumps(response, ensure_ascii=False), exchange.abort))
            return replace(prepared, reply_format=reply_format, rich=prepared.rich or RichOptions())

        return prepare_parsed_chat(worker, exchange, chat_fields, dress)

    def get(self, exchange: Exchange, response_id: str) -> None:
        """Answer with a response. HTTP thread."""
        body = self.store.body(response_id)
        if body is None:
            raise _missing(response_id)
        exchange.respond(200, JSON_HEADERS, body)

    def delete(self, exchange: Exchange, response_id: str) -> None:
        """Forget a response. HTTP thread."""
        if not self.store.delete(response_id):
            raise _missing(response_id)
        content = {"id": response_id, "object": "response", "deleted": True}
        exchange.respond(200, JSON_HEADERS, json.dumps(content))

    def cancel(self, worker: GenerationWorker, exchange: Exchange, response_id: str) -> None:
        """End a response that is being made; its own answer says so too. Preprocess thread."""
        exchange.take_body()
        running = self.store.running(response_id)
        if running is None:
            if self.store.body(response_id) is None:
                raise _missing(response_id)
            raise InvalidRequestError("The response is not being made any more.", param="response_id")
        running.abort()
        worker.recorder.count("200")
        body = json.dumps(json.loads(running.body) | {"status": "cancelled"}, ensure_ascii=False)
        exchange.respond(200, JSON_HEADERS, body)


def _missing(response_id: str) -> HttpError:
    return HttpError(404, f"There is no response '{response_id[:80]}' here.")


def _begun(response_id: str, model: str, fields: ResponsesRequest, *, is_kept: bool) -> dict[str, Any]:
    """Return a response without output."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning is not None else None, "summary": None},
        "store": is_kept,
        "temperature": fields.temperature,
        "text": {"format": (fields.text.format if fields.text is not None else None) or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": fields.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
    }
