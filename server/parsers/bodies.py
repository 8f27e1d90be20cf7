"""What stands behind the markers of Mistral and DeepSeek."""

from __future__ import annotations

import regex

from ftserve.server.parsers.json_stream import JsonArguments, JsonCall
from ftserve.server.parsers.marked import NotACallError
from ftserve.server.rich import Kind, Piece

# ruff: noqa: RUF001 - DeepSeek's markers are written with full-width bars

_S = r"\s{0,99}+"
_MISTRAL_NAME = regex.compile(
    rf"{_S}([^\s{{}}\[\]]{{1,256}}+){_S}(?:\[CALL_ID\][^\[{{]{{0,64}}+)?(?:\[ARGS\])?{_S}(?=\{{)"
)
_DEEPSEEK_NAME = regex.compile(
    rf"{_S}(?:function<｜tool▁sep｜>([^\n<]{{1,256}}+)\n```json{_S}(?=\{{)"
    rf"|(?!function<)([^\n<]{{1,256}}+)<｜tool▁sep｜>{_S}(?=\{{))"
)
_DEEPSEEK_END = regex.compile(rf"{_S}(?:```{_S})?<｜tool▁call▁end｜>")


class NamedArguments:
    """A name, then the arguments as a JSON object; a `CallBody`."""

    def __init__(self, name: regex.Pattern[str], end: regex.Pattern[str] | None = None) -> None:
        """Begin before the name, a group of the pattern; `end` is what belongs to the call behind its arguments."""
        self.is_announced = False
        self._name = name
        self._end = end
        self._text = ""
        self._arguments = JsonArguments()
        self._is_behind = False

    @property
    def num_held(self) -> int:
        return len(self._text) + self._arguments.num_held

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        pieces: list[Piece] = []
        if not self.is_announced:
            self._text += text
            found = self._name.match(self._text, partial=True)
            if found is None:
                raise NotACallError
            if found.partial:
                return pieces, None
            self.is_announced = True
            pieces.append(Piece(Kind.CALL, next(filter(None, found.groups())).strip()))
            text, self._text = self._text[found.end() :], ""
        if not self._is_behind:
            rest = self._arguments.push(text, pieces)
            if rest is None:
                return pieces, None
            text, self._is_behind = rest, True
        return pieces, self._skip_end(text)

    def _skip_end(self, text: str) -> str | None:
        if self._end is None:
            return text
        self._text += text
        found = self._end.match(self._text, partial=True)
        if found is not None and found.partial:
            return None
        return self._text if found is None else self._text[found.end() :]

    def flush(self) -> list[Piece]:
        if self._is_behind:
            return [Piece(Kind.CONTENT, self._text)] if self._text.strip(" \n`") else []
        return self._arguments.flush()


class JsonCalls:
    """A JSON array of calls; a `CallBody`."""

    def __init__(self) -> None:
        self.is_announced = False
        self._text = ""  # before, between and behind the calls
        self._call: JsonCall | None = None

    @property
    def num_held(self) -> int:
        return len(self._text) + (self._call.num_held if self._call is not None else 0)

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        pieces: list[Piece] = []
        while True:
            if self._call is None:
                text, self._text = self._text + text, ""
                rest = text.lstrip()
                if not rest:
                    self._text = text
                    return pieces, None
                if rest[0] == "]" and self.is_announced:
                    return pieces, rest[1:]
                if rest[0] != ("," if self.is_announced else "["):
                    if not self.is_announced:
                        raise NotACallError
                    return pieces, text
                self._call, text = JsonCall(), rest[1:]
            try:
                found, behind = self._call.push(text)
            except NotACallError:
                if not self.is_announced:
                    raise
                held, self._call = self._call.text + text, None
                return pieces, held
            pieces += found
            self.is_announced |= self._call.is_announced
            if behind is None:
                return pieces, None
            self._call, text = None, behind

    def flush(self) -> list[Piece]:
        if self._call is None:
            return []
        return self._call.flush() if self._call.is_announced else [Piece(Kind.CONTENT, self._call.text)]


class MistralCall:
    """An array of calls, or since 2025 a name with its arguments; a `CallBody`."""

    def __init__(self) -> None:
        self._body: JsonCalls | NamedArguments | None = None
        self._blank = ""

    @property
    def is_announced(self) -> bool:
        return self._body is not None and self._body.is_announced

    @property
    def num_held(self) -> int:
        return len(self._blank) + (self._body.num_held if self._body is not None else 0)

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        if self._body is None:
            text = self._blank + text
            if not text.lstrip():
                self._blank = text
                return [], None
            self._body, self._blank = (JsonCalls() if text.lstrip()[0] == "[" else NamedArguments(_MISTRAL_NAME)), ""
        return self._body.push(text)

    def flush(self) -> list[Piece]:
        return self._body.flush() if self._body is not None else []


def deepseek_call() -> NamedArguments:
    """Return the body of a call as V3 (with a fence around the arguments) or V3.1 writes it."""
    return NamedArguments(_DEEPSEEK_NAME, _DEEPSEEK_END)
