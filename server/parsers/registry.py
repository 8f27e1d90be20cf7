"""The parsers by the names that operators know, and which of them a chat template asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftserve.server.parsers.bare import LlamaJsonParser, PythonicParser
from ftserve.server.parsers.bodies import MistralCall, deepseek_call
from ftserve.server.parsers.harmony import MARKERS, HarmonyParser
from ftserve.server.parsers.json_stream import JsonCall
from ftserve.server.parsers.marked import MarkedParser
from ftserve.server.parsers.tagged import GLM, QWEN_CODER, TaggedCall, tool_types
from ftserve.server.rich import OutputParser, make_call_id

Schemas = Mapping[str, Any]  # the JSON schema of each tool's arguments, by its name
MakeParser = Callable[[], OutputParser]

# ruff: noqa: RUF001 - DeepSeek's markers are written with full-width bars

_GLM_MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_LAYOUT = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    prepare: Callable[[Schemas], MakeParser]  # once a request
    signs: tuple[str, ...]  # any of them in a chat template tells the family
    markers: tuple[str, ...] = ()  # texts that the parser needs to see, even of special tokens
    make_call_id: Callable[[], str] = make_call_id


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """How a family marks its thoughts."""

    start: str
    end: str
    signs: tuple[str, ...]
    is_always_open: bool = False  # the output begins with a thought even if the prompt does not open it


def _short_id() -> str:
    """Return an id as Mistral's templates insist on: nine letters and digits."""
    return "".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", k=9))  # noqa: S311


def _hermes(_schemas: Schemas) -> MakeParser:
    return lambda: MarkedParser(("<tool_call>",), ("</tool_call>",), lambda _opener: JsonCall())


def _qwen_coder(schemas: Schemas) -> MakeParser:
    types = tool_types(schemas)
    openers, closers = ("<tool_call>", "<function="), ("</tool_call>", "</function>")
    return lambda: MarkedParser(openers, closers, lambda _opener: TaggedCall(QWEN_CODER, types))


def _glm(schemas: Schemas) -> MakeParser:
    types = tool_types(schemas)
    return lambda: MarkedParser(("<tool_call>",), ("</tool_call>",), lambda _opener: TaggedCall(GLM, types))


def _mistral(_schemas: Schemas) -> MakeParser:
    return lambda: MarkedParser(("[TOOL_CALLS]",), (), lambda _opener: MistralCall())


def _deepseek(_schemas: Schemas) -> MakeParser:
    return lambda: MarkedParser((_DEEPSEEK_CALL,), (), lambda _opener: deepseek_call(), layout=_DEEPSEEK_LAYOUT)


def _llama(schemas: Schemas) -> MakeParser:
    return lambda: LlamaJsonParser(schemas.keys())


def _pythonic(schemas: Schemas) -> MakeParser:
    return lambda: PythonicParser(schemas.keys())


TOOL_PARSERS: dict[str, ToolFormat] = {  # in the order in which signs are looked for
    "harmony": ToolFormat(lambda _schemas: HarmonyParser, ("<|channel|>",), MARKERS),
    "qwen3_coder": ToolFormat(_qwen_coder, ("<function=",), ("<tool_call>", "</tool_call>")),
    "glm45": ToolFormat(
        _glm, ("<arg_key>",), ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "hermes": ToolFormat(_hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    "deepseek": ToolFormat(_deepseek, (_DEEPSEEK_CALL,), (_DEEPSEEK_CALL, *_DEEPSEEK_LAYOUT, "<｜tool▁sep｜>")),
    "mistral": ToolFormat(_mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _short_id),
    "pythonic": ToolFormat(_pythonic, ("<|python_start|>",), ("<|python_start|>", "<|python_end|>")),
    "llama3_json": ToolFormat(_llama, ("<|python_tag|>", '"parameters": dictionary of argument'), ("<|python_tag|>",)),
}
TOOL_PARSER_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "openai": "harmony",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
}
DEFAULT_TOOL_PARSER = "hermes"

THOUGHT_PARSERS: dict[str, ThoughtFormat] = {
    "think": ThoughtFormat("<think>", "</think>", ("<think>", "</think>")),
    "deepseek_r1": ThoughtFormat("<think>", "</think>", (), is_always_open=True),
    "mistral": ThoughtFormat("[THINK]", "[/THINK]", ("[THINK]",)),
    "seed": ThoughtFormat("<seed:think>", "</seed:think>", ("<seed:think>",)),
}
THOUGHT_PARSER_ALIASES = {
    "qwen3": "think",
    "glm45": "think",
    "deepseek_v3": "think",
    "magistral": "mistral",
    "seed_oss": "seed",
}


def detect(template: str, formats: Mapping[str, ToolFormat] | Mapping[str, ThoughtFormat]) -> str | None:
    """Return the first of `formats` that has a sign in the source of a chat template."""
    return next((name for name, form in formats.items() if any(sign in template for sign in form.signs)), None)
