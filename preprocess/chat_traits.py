"""What a chat template does with tools, learned from its source and by trying it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftserve.engine.errors import InvalidRequestError
from ftserve.preprocess.chat import ChatTemplate

_PROBE_KEY = "probe_key"


@dataclass(frozen=True, slots=True)
class ChatTraits:
    """What messages have to look like for one template."""

    shows_tools: bool = False  # it writes them into the prompt itself
    knows_developers: bool = False  # it has a role `developer`
    wants_objects: bool = True  # a tool call's arguments are mappings to it, not JSON text

    @classmethod
    def of(cls, source: str, special_tokens: Mapping[str, str]) -> ChatTraits:
        """Look at a template.

        Raises:
            ValueError: it does not compile.
        """
        template = ChatTemplate(source, special_tokens)
        return cls(
            shows_tools="tools" in source,
            knows_developers="developer" in source,
            wants_objects=_wants_objects(template),
        )


def _wants_objects(template: ChatTemplate) -> bool:
    """Whether arguments that are given as a mapping come out as JSON, and not as Python writes it."""
    as_object = _render_call(template, {_PROBE_KEY: "x"})
    if as_object is not None and _PROBE_KEY in as_object and f"'{_PROBE_KEY}'" not in as_object:
        return True
    as_text = _render_call(template, f'{{"{_PROBE_KEY}": "x"}}')
    return as_text is None or f'"{_PROBE_KEY}"' not in as_text


def _render_call(template: ChatTemplate, arguments: Any) -> str | None:
    function = {"name": "f", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "x"},
    ]
    try:
        return template.render(messages)
    except InvalidRequestError:
        return None
