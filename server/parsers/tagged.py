"""Calls whose arguments stand in tags of their own: Qwen3-Coder and GLM.

The values are written bare; the tool's schema tells strings from other JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from ftserve.preprocess.vocabulary import json_escape
from ftserve.server.parsers.json_stream import json_or_none
from ftserve.server.parsers.marked import NotACallError, held_back
from ftserve.server.rich import Kind, Piece

ToolTypes = Mapping[str, Mapping[str, frozenset[str]]]  # tool: parameter: names of the JSON types it may have

_ANY = frozenset({"null", "boolean", "integer", "number", "array", "object"})
_STRING = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class TagFormat:
    """How a family writes calls. Patterns match at the beginning of what is left."""

    name: Any  # compiled; group 1
    key: Any  # compiled; group 1; what follows is the value
    value_ends: tuple[str, ...]  # any of them ends a value; the first belongs to it
    end: Any  # compiled
    strips_newline: bool  # values have a line of their own


QWEN_CODER = TagFormat(
    name=regex.compile(r"\s{0,99}+(?:<function=)?([^<>\s]{1,256}+)>"),
    key=regex.compile(r"\s{0,99}+<parameter=([^<>]{1,256}+)>"),
    value_ends=("</parameter>", "<parameter=", "</function>", "</tool_call>"),
    end=regex.compile(r"\s{0,99}+</(?:function|tool_call)>"),
    strips_newline=True,
)
GLM = TagFormat(
    name=regex.compile(r"\s{0,99}+([^<>\s{]{1,256}+)(?=\s{0,99}+<)"),
    key=regex.compile(r"\s{0,99}+<arg_key>([^<]{0,256}+)</arg_key>\s{0,99}+<arg_value>"),
    value_ends=("</arg_value>", "<arg_key>", "</tool_call>"),
    end=regex.compile(r"\s{0,99}+</tool_call>"),
    strips_newline=False,
)


class TaggedCall:
    """A call of one of these families; a `CallBody`. Strings are given out as they come, other values whole."""

    def __init__(self, form: TagFormat, types: ToolTypes) -> None:
        self.is_announced = False
        self._form = form
        self._types = types
        self._parameters: Mapping[str, frozenset[str]] = {}
        self._text = ""
        self._num_arguments = 0
        self._value_types: frozenset[str] | None = None  # of the value that is being read
        self._is_first_of_value = False

    @property
    def num_held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        self._text += text
        pieces: list[Piece] = []
        if not self.is_announced and not self._take_name(pieces):
            return pieces, None
        while True:
            if self._value_types is not None:
                if not self._take_value(self._value_types, pieces):
                    return pieces, None
                continue
            key, end = (p.match(self._text, partial=True) for p in (self._form.key, self._form.end))
            if key is not None and not key.partial:
                self._begin_value(key, pieces)
            elif end is not None and not end.partial:
                pieces.append(Piece(Kind.ARGUMENTS, "}" if self._num_arguments else "{}"))
                return pieces, self._text[end.end() :]
            elif key is None and end is None:  # the call ends without its end
                pieces.append(Piece(Kind.ARGUMENTS, "}" if self._num_arguments else "{}"))
                return pieces, self._text
            else:
                return pieces, None

    def flush(self) -> list[Piece]:
        if self._value_types is None:
            return []
        text = self._text if self._value_types != _STRING else self._string_part(self._text)
        return [Piece(Kind.ARGUMENTS, text)] if text else []

    def _take_name(self, pieces: list[Piece]) -> bool:
        found = self._form.name.match(self._text, partial=True)
        if found is None:
            raise NotACallError
        if found.partial:
            return False
        self.is_announced = True
        name, self._text = found[1], self._text[found.end() :]
        self._parameters = self._types.get(name, {})
        pieces.append(Piece(Kind.CALL, name))
        return True

    def _begin_value(self, key: Any, pieces: list[Piece]) -> None:
        name = key[1].strip()
        self._text = self._text[key.end() :]
        self._value_types = self._parameters.get(name, _STRING)
        self._is_first_of_value = True
        opening = ", " if self._num_arguments else "{"
        quote = '"' if self._value_types == _STRING else ""
        self._num_arguments += 1
        pieces.append(Piece(Kind.ARGUMENTS, f"{opening}{json.dumps(name, ensure_ascii=False)}: {quote}"))

    def _take_value(self, types: frozenset[str], pieces: list[Piece]) -> bool:
        """Take what there is of a value; True if it has ended."""
        if "<" not in self._text:  # of no marker anything
            if types == _STRING:
                self._give_string(pieces, may_end=False)
            return False
        ends = self._form.value_ends
        at, marker = min(((at, marker) for marker in ends if (at := self._text.find(marker)) >= 0), default=(-1, ""))
        if at < 0:
            if types == _STRING:
                self._give_string(pieces, may_end=True)
            return False
        value = self._text[:at]
        self._text = self._text[at + len(marker) :] if marker == ends[0] else self._text[at:]
        if types == _STRING:
            if self._form.strips_newline:
                value = value.removesuffix("\n")
            pieces.append(Piece(Kind.ARGUMENTS, f'{self._string_part(value)}"'))
        else:
            pieces.append(Piece(Kind.ARGUMENTS, as_json(value, types)))
        self._value_types = None
        return True

    def _give_string(self, pieces: list[Piece], *, may_end: bool) -> None:
        """Give out what certainly belongs to a string."""
        text = self._text
        kept = held_back(text, self._form.value_ends) if may_end else 0
        if self._form.strips_newline:
            if self._is_first_of_value and text in ("", "\n"):
                return
            kept += text[: len(text) - kept].endswith("\n")
        given = text[: len(text) - kept]
        if given:
            pieces.append(Piece(Kind.ARGUMENTS, self._string_part(given)))
            self._text = text[len(given) :]

    def _string_part(self, text: str) -> str:
        if self._form.strips_newline and self._is_first_of_value:
            text = text.removeprefix("\n")
        self._is_first_of_value = False
        return json_escape(text)


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a bare value as JSON of one of `types`; as a string, if it is of none."""
    text = text.strip("\n")
    bare = _WORDS.get(text.strip(), text.strip())
    value = json_or_none(bare)
    if (value is not None or bare == "null") and not types.isdisjoint(_types_of_value(value)):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _types_of_value(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return set()


def tool_types(tools: Mapping[str, Any]) -> ToolTypes:
    """Return the types of each parameter of each tool; `tools` are JSON schemas by name."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for name, schema in tools.items():
        properties = schema.get("properties") if isinstance(schema, dict) else None
        found[name] = {key: _types(part) for key, part in properties.items()} if isinstance(properties, dict) else {}
    return found


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; all but string come first when a value can be read as both."""
    if not isinstance(schema, dict):
        return _ANY
    if isinstance(given := schema.get("type"), str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(part for part in given if isinstance(part, str))
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset().union(*(_types_of_value(v) if not isinstance(v, str) else _STRING for v in values))
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            return frozenset().union(*map(_types, parts))
    return _ANY
