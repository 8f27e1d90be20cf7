"""JSON that arrives in pieces: where a value ends, and tool calls written as objects."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import regex

from ftserve.server.parsers.marked import NotACallError
from ftserve.server.rich import Kind, Piece

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')

_S = r"\s{0,99}+"
_STRING = r'"(?:[^"\\]|\\.){0,256}+"'
_LABEL = rf'"(?:type|id)"{_S}:{_S}{_STRING}{_S}'
_HEAD = regex.compile(
    rf'{_S}\{{{_S}(?:{_LABEL},{_S})*+"name"{_S}:{_S}({_STRING}){_S}(?:,{_S}{_LABEL})*+'
    rf',{_S}"(?:arguments|parameters)"{_S}:'
)
# Whether it can still be a call, whatever the order of its keys.
_FIRST_KEY = regex.compile(rf'{_S}\{{{_S}"(?:name|arguments|parameters|type|id|function)"{_S}:')


class JsonEnd:
    """Finds where an object, an array or a string ends. One object a value."""

    __slots__ = ("_depth", "_in_string", "_is_escaped")

    def __init__(self, depth: int = 0) -> None:
        """Begin before the value, or inside of `depth` brackets whose closing ends it."""
        self._depth = depth
        self._in_string = self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Return where in `text`, which follows what was scanned before, the value ends; None if it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            char = found[0]
            if char == "\\":
                self._is_escaped = True
                continue
            if char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return at
        return None


class JsonArguments:
    """Arguments as a JSON value: an object is given out as it comes, a string with JSON in it when it is whole."""

    __slots__ = ("_end", "_is_streamed", "_text")

    def __init__(self) -> None:
        self._text = ""  # not given out
        self._is_streamed: bool | None = None  # None: nothing but white space came
        self._end = JsonEnd()

    @property
    def num_held(self) -> int:
        return len(self._text)

    def push(self, text: str, pieces: list[Piece]) -> str | None:
        """Add pieces; return what follows the value once it has ended."""
        if self._is_streamed is None:
            text = text.lstrip()
            if not text:
                return None
            self._is_streamed = text[0] in "{["
        if self._is_streamed:
            end = self._end.scan(text)
            if text[:end]:
                pieces.append(Piece(Kind.ARGUMENTS, text[:end]))
            return None if end is None else text[end:]
        self._text += text
        if self._text[0] == '"':
            end = self._end.scan(text)
        else:  # null, or what no object of arguments can be
            end = next((k for k, char in enumerate(text) if char in ",}\n"), None)
        if end is None:
            return None
        value, self._text = self._text[: len(self._text) - len(text) + end], ""
        pieces.append(Piece(Kind.ARGUMENTS, _as_object(value.strip())))
        return text[end:]

    def flush(self) -> list[Piece]:
        return [Piece(Kind.ARGUMENTS, self._text)] if self._text else []


class JsonCall:
    """A call as an object with `name` and `arguments` (or `parameters`), whose arguments are given out as they come.

    Where the arguments stand before the name, all of it waits for the object's end. It is a `CallBody`.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """Begin before the object. With `names`, a call of another function is no call."""
        self.is_announced = False
        self._names = names
        self._head = ""
        self._arguments: JsonArguments | None = None
        self._end = JsonEnd()  # of the object

    @property
    def text(self) -> str:
        """What was taken, before it `is_announced`."""
        return self._head

    @property
    def num_held(self) -> int:
        return len(self._head) + (self._arguments.num_held if self._arguments is not None else 0)

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        pieces: list[Piece] = []
        if not self.is_announced:
            rest = self._push_head(text, pieces)
            if self._arguments is None:
                return pieces, rest
            text = rest or ""
        if self._arguments is not None:
            behind = self._arguments.push(text, pieces)
            if behind is None:
                return pieces, None
            self._arguments, text = None, behind
        end = self._end.scan(text)
        return pieces, None if end is None else text[end:]

    def flush(self) -> list[Piece]:
        return [] if self._arguments is None else self._arguments.flush()

    def _push_head(self, text: str, pieces: list[Piece]) -> str | None:
        """Look for the name, and return what follows the head, or else the whole object if that ended first."""
        end = self._end.scan(text)
        self._head += text
        found = _HEAD.match(self._head, partial=True)
        if found is not None and not found.partial:
            rest, self._head = self._head[found.end() :], ""
            self._announce(json_or_none(found[1]), pieces)
            self._arguments, self._end = JsonArguments(), JsonEnd(depth=1)
            return rest
        if found is None and _FIRST_KEY.match(self._head, partial=True) is None:
            raise NotACallError
        if end is None:
            return None
        whole = self._head[: len(self._head) - len(text) + end]
        self._take_whole(json_or_none(whole), pieces)
        self._head = ""
        return text[end:]

    def _take_whole(self, value: Any, pieces: list[Piece]) -> None:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict):
            raise NotACallError
        self._announce(value.get("name"), pieces)
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        pieces.append(Piece(Kind.ARGUMENTS, arguments))

    def _announce(self, name: object, pieces: list[Piece]) -> None:
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            raise NotACallError
        self.is_announced = True
        pieces.append(Piece(Kind.CALL, name))


def json_or_none(text: str) -> Any:
    """Return the value of JSON text, None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _as_object(value: str) -> str:
    if value == "null":
        return "{}"
    decoded = json_or_none(value)
    return decoded if isinstance(decoded, str) else value
