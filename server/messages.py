"""Chat messages as clients send them, made into what the model's template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ftserve.engine.errors import InvalidRequestError
from ftserve.preprocess.chat_traits import ChatTraits

_PLAIN_ROLES = frozenset({"user", "system"})


def for_template(messages: Sequence[dict[str, Any]], traits: ChatTraits) -> list[dict[str, Any]]:
    """Return messages whose content is text or parts, with calls and thoughts where the template looks for them.

    Raises:
        InvalidRequestError: a message lacks what its role needs.
    """
    return [
        message
        if message["role"] in _PLAIN_ROLES and message.get("content") is not None
        else _adapt(dict(message), f"messages.{k}", traits)
        for k, message in enumerate(messages)
    ]


def _adapt(message: dict[str, Any], where: str, traits: ChatTraits) -> dict[str, Any]:
    if message["role"] == "developer" and not traits.knows_developers:
        message["role"] = "system"
    elif message["role"] == "assistant":
        _adapt_answer(message, where, traits)
    if message.get("content") is None:
        raise InvalidRequestError(
            f"A message of role '{message['role'][:40]}' needs 'content'.", param=f"{where}.content"
        )
    return message


def _adapt_answer(message: dict[str, Any], where: str, traits: ChatTraits) -> None:
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequestError("'tool_calls' must be a list.", param=f"{where}.tool_calls")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls.{k}", traits) for k, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)  # templates ask whether it is there
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str):
        message["reasoning_content"] = message["thinking"] = thought
    if message.get("content") is None:
        if calls or message.get("function_call"):
            message["content"] = ""
        elif isinstance(message.get("refusal"), str):
            message["content"] = message["refusal"]


def _call(call: Any, where: str, traits: ChatTraits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("A tool call needs a function with a name.", param=f"{where}.function")
    arguments = function.get("arguments")
    if traits.wants_objects and isinstance(arguments, str):
        arguments = _object(arguments)
    elif not traits.wants_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}


def _object(arguments: str) -> Any:
    """Return what the text of arguments says; the text itself if it is no JSON, as models sometimes write it."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
