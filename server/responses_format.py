"""How `POST /v1/responses` answers: items that grow by deltas, and the events that tell of it.

Owned by the output thread of its reply. Streamed and whole answers come from the same items.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from random import getrandbits
from typing import Any

from ftserve.engine.types import Usage
from ftserve.server.choice import ChoiceEnd
from ftserve.server.extras import NOTHING
from ftserve.server.problems import Problem
from ftserve.server.rich import Delta, Kind, Message

Event = tuple[str, dict[str, Any]]  # its type and what belongs to it besides that

_PREFIXES = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_TEXT_EVENTS = {Kind.CONTENT: "response.output_text", Kind.REASONING: "response.reasoning_text"}


class Items:
    """The output of a response as it grows."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: Kind | None = None  # of the item that is open
        self._texts: list[str] = []  # of the item that is open

    def add(self, delta: Delta) -> list[Event]:
        """Take a delta and return what it makes happen."""
        if delta.kind is Kind.ARGUMENTS:
            self._texts += delta.texts
            return [("response.function_call_arguments.delta", {**self._where(), "delta": delta.text})]
        events: list[Event] = []
        if delta.kind is Kind.CALL or delta.kind is not self._kind:
            if not delta.texts:
                return []
            events = self.close("completed")
            events += self._open(delta)
        if delta.kind is not Kind.CALL and delta.texts:
            self._texts += delta.texts
            more: dict[str, Any] = {"logprobs": []} if delta.kind is Kind.CONTENT else {}
            place = {**self._where(), "content_index": 0, "delta": delta.text, **more}
            events.append((f"{_TEXT_EVENTS[delta.kind]}.delta", place))
        return events

    def close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        item, where, text = self.output[-1], self._where(), "".join(self._texts)
        self._texts = []
        item["status"] = status
        events: list[Event] = []
        if kind is Kind.CALL:
            item["arguments"] = text
            done = {**where, "name": item["name"], "arguments": text}
            events.append(("response.function_call_arguments.done", done))
        else:
            item["content"] = [_part(kind, text)]
            more: dict[str, Any] = {"logprobs": []} if kind is Kind.CONTENT else {}
            events.append((f"{_TEXT_EVENTS[kind]}.done", {**where, "content_index": 0, "text": text, **more}))
            part = {**where, "content_index": 0, "part": item["content"][0]}
            events.append(("response.content_part.done", part))
        events.append(("response.output_item.done", {"output_index": where["output_index"], "item": item}))
        return events

    def _open(self, delta: Delta) -> list[Event]:
        kind = self._kind = delta.kind
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{getrandbits(192):048x}", "status": "in_progress"}
        if kind is Kind.CALL:
            item |= {"type": "function_call", "call_id": delta.call_id, "name": delta.text, "arguments": ""}
        elif kind is Kind.REASONING:
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self.output.append(item)
        events: list[Event] = [
            ("response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)})
        ]
        if kind is not Kind.CALL:
            part = {**self._where(), "content_index": 0, "part": _part(kind, "")}
            events.append(("response.content_part.added", part))
        return events

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponsesFormat:
    """A `ReplyFormat`. Every answer goes the rich way; there is one choice."""

    done = ""  # OpenAI's streams of responses end with their last event

    def __init__(self, response: dict[str, Any], finished: Callable[[dict[str, Any]], None]) -> None:
        """Answer with `response`, completed by what comes; `finished` gets it once it is."""
        self.extras = NOTHING
        self._response = response
        self._finished = finished
        self._items = Items()
        self._num_events = 0

    def opening(self, _index: int) -> str:
        return self._write([(f"response.{what}", {"response": self._response}) for what in ("created", "in_progress")])

    def delta(self, _index: int) -> tuple[str, str]:
        return "", ""

    def rich_delta(self, _index: int, delta: Delta) -> str:
        return self._write(self._items.add(delta))

    def closing(self, _index: int, end: ChoiceEnd) -> str:
        return self._write(self._end(end))

    def last(self, usage: Usage) -> str:
        self._complete(usage)
        return self._write([(f"response.{self._response['status']}", {"response": self._response})])

    def choice(self, index: int, escaped: str, end: ChoiceEnd) -> str:
        raise AssertionError("every answer is rich")

    def rich_choice(self, _index: int, message: Message, end: ChoiceEnd) -> str:
        for delta in message.deltas:
            self._items.add(delta)
        self._end(end)
        return ""

    def whole(self, _choices: Sequence[str], usage: Usage) -> str:
        self._complete(usage)
        return json.dumps(self._response, ensure_ascii=False)

    def failure(self, problem: Problem) -> str:
        """Return the events that end a stream early, by an error or because it was cancelled."""
        status = "cancelled" if problem.code == "cancelled" else "failed"
        self._items.close("incomplete")
        error = None if status == "cancelled" else {"code": problem.code or "server_error", "message": problem.message}
        self._response |= {"status": status, "error": error, "output": self._items.output}
        self._finished(self._response)
        return self._write([("response.failed", {"response": self._response})])

    def _end(self, end: ChoiceEnd) -> list[Event]:
        is_cut = end.finish_reason == '"length"'
        self._response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._items.close(self._response["status"])

    def _complete(self, usage: Usage) -> None:
        self._response |= {
            "completed_at": time.time(),
            "output": self._items.output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        self._finished(self._response)

    def _write(self, events: Sequence[Event]) -> str:
        parts = []
        for kind, content in events:
            data = json.dumps({"type": kind, "sequence_number": self._num_events, **content}, ensure_ascii=False)
            parts.append(f"event: {kind}\ndata: {data}\n\n")
            self._num_events += 1
        return "".join(parts)
