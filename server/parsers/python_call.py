"""Function calls as Python writes them, read without running anything: `f(city='Rome', days=3)`."""

from __future__ import annotations

import re
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>[+-]?(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)?))
    |(?P<name>[^\W\d][\w.\-]*)|(?P<sign>[()\[\]{},:=]))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_BRACKET = re.compile(r"""[()\[\]{}'"\\]""")
_MAX_DEPTH = 64


class CallEnd:
    """Finds where a call ends in text that grows. One object a call."""

    __slots__ = ("_at", "_depth", "_quote")

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int:
        """Return where the call that `text` begins with ends; -1 if it goes on, 0 if it is none.

        `text` is what the last time was given, and more.
        """
        while (found := _BRACKET.search(text, self._at)) is not None:
            char = found[0]
            if char == "\\" and found.end() == len(text):
                return -1  # what it escapes is yet to come
            self._at = found.end() + (char == "\\")
            if char == "\\":
                continue
            if self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "'\"":
                if self._depth == 0:
                    return 0
                self._quote = char
            elif char in "([{":
                if self._depth == 0 and char != "(":
                    return 0
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at if self._depth == 0 else 0
        self._at = max(self._at, len(text))
        return -1


def read_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the function's name and its keyword arguments; None if `text` is no such call."""
    try:
        reader = _Reader(text)
        name = reader.take("name")
        reader.sign("(")
        arguments: dict[str, Any] = {}
        while not reader.is_sign(")"):
            key = reader.take("name")
            reader.sign("=")
            arguments[key] = reader.value(0)
            if reader.is_sign(")"):
                break
            reader.sign(",")
    except (_MalformedError, ValueError, OverflowError):
        return None
    return name, arguments


class _MalformedError(Exception):
    pass


class _Reader:
    """Reads literals from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _next(self) -> tuple[str, str, int]:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            raise _MalformedError
        return found.lastgroup, found[found.lastgroup], found.end()

    def take(self, kind: str) -> str:
        found, token, end = self._next()
        if found != kind:
            raise _MalformedError
        self._at = end
        return token

    def sign(self, expected: str) -> None:
        if self.take("sign") != expected:
            raise _MalformedError

    def is_sign(self, expected: str) -> bool:
        """Take `expected` if it comes next; whether it did."""
        kind, token, end = self._next()
        is_it = kind == "sign" and token == expected
        if is_it:
            self._at = end
        return is_it

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _MalformedError
        kind, piece, end = self._next()
        self._at = end
        if kind == "string":
            return _ESCAPE.sub(_unescape, piece[1:-1])
        if kind == "number":
            return int(piece) if piece.lstrip("+-").isdigit() else float(piece)
        if kind == "name" and piece in _WORDS:
            return _WORDS[piece]
        if piece in "[(":
            return self._items("]" if piece == "[" else ")", depth)
        if piece == "{":
            return self._pairs(depth)
        raise _MalformedError

    def _items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.is_sign(closing):
            items.append(self.value(depth + 1))
            if self.is_sign(closing):
                break
            self.sign(",")
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self.is_sign("}"):
            key = self.value(depth + 1)
            self.sign(":")
            pairs[str(key)] = self.value(depth + 1)
            if self.is_sign("}"):
                break
            self.sign(",")
        return pairs


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"
    return _ESCAPES.get(code, code if code in "\\'\"" else found[0])
