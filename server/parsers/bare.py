"""Calls without markers: the whole output is calls, or none of it is. Llama, and what `tool_choice` forces."""

from __future__ import annotations

import json
from collections.abc import Collection

from ftserve.server.parsers.bodies import JsonCalls
from ftserve.server.parsers.json_stream import JsonCall
from ftserve.server.parsers.marked import CallBody, NotACallError
from ftserve.server.parsers.python_call import CallEnd, read_call
from ftserve.server.rich import Kind, Piece

_LLAMA_MARK = "<|python_tag|>"
_PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")


class LlamaJsonParser:
    """Objects with `name` and `parameters`, separated by semicolons; of Llama 3.1 and later.

    A call can only stand where the output, or what follows a call, begins. Only names of tools that there are count:
    the model may want to answer with JSON.
    """

    is_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not decided about
        self._call: JsonCall | None = None
        self._has_called = self._is_content = False

    @property
    def num_held(self) -> int:
        announced = self._call is not None and self._call.is_announced
        return self._call.num_held if announced and self._call is not None else len(self._text)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text and not self._is_content:
            text = self._push_call(text, pieces) if self._call is not None else self._begin(text)
        if text:
            pieces.append(Piece(Kind.CONTENT, text))
        return pieces

    def flush(self) -> list[Piece]:
        if self._call is not None and self._call.is_announced:
            return self._call.flush()
        rest, self._text = self._text, ""
        return [Piece(Kind.CONTENT, rest)] if rest.strip(" \n;" if self._has_called else "") else []

    def _begin(self, text: str) -> str:
        self._text += text
        rest = self._text.lstrip(" \n\t;" if self._has_called else None)
        if rest.startswith(_LLAMA_MARK):
            rest = rest[len(_LLAMA_MARK) :].lstrip()
        elif _LLAMA_MARK.startswith(rest):
            return ""
        if not rest:
            return ""
        if rest[0] == "{":
            self._call = JsonCall(self._names)
            self._text = self._text[: len(self._text) - len(rest)]
            return rest
        self._is_content = True
        whole, self._text = self._text, ""
        return whole

    def _push_call(self, text: str, pieces: list[Piece]) -> str:
        assert self._call is not None, "the caller looked"
        self._text += text
        try:
            found, rest = self._call.push(text)
        except NotACallError:
            self._call, self._is_content = None, True
            whole, self._text = self._text, ""
            return whole
        pieces += found
        if self._call.is_announced:
            self._text = ""
        if rest is None:
            return ""
        self._call, self._has_called, self._text = None, True, ""
        return rest


class PythonicParser:
    """A list of calls as Python writes them, `[f(x=1), g()]`; of Llama 4 and others. Each call is given out whole."""

    is_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        self._end = CallEnd()  # of the call that `_text` begins with
        self._state = "begin"  # begin, calls, behind, content

    @property
    def num_held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        if self._state == "begin":
            self._begin()
        while self._state == "calls" and self._take_call(pieces):
            pass
        if self._state == "behind":
            self._look_behind()
        if self._state == "content" and self._text:
            pieces.append(Piece(Kind.CONTENT, self._text))
            self._text = ""
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._text = self._text, ""
        return [Piece(Kind.CONTENT, rest)] if rest else []

    def _begin(self) -> None:
        rest = self._text.lstrip()
        mark = _PYTHON_MARKS[0]
        if rest.startswith(mark):
            rest = rest[len(mark) :].lstrip()
        elif mark.startswith(rest):
            return
        if rest:
            if rest[0] == "[":
                self._look_at_first(rest)
            else:
                self._state = "content"

    def _look_at_first(self, rest: str) -> None:
        """Leave the beginning once the first call is whole, or cannot be one."""
        end = self._end.find(rest[1:])
        if end == -1:
            return
        call = read_call(rest[1 : 1 + end]) if end else None
        if call is None or call[0] not in self._names:
            self._state = "content"
        else:
            self._state, self._text, self._end = "calls", rest[1:], CallEnd()

    def _look_behind(self) -> None:
        """Drop the closing mark and white space; what follows is content."""
        self._text = self._text.lstrip()
        if self._text.startswith(_PYTHON_MARKS[1]):
            self._text = self._text[len(_PYTHON_MARKS[1]) :].lstrip()
        if not _PYTHON_MARKS[1].startswith(self._text):
            self._state = "content"

    def _take_call(self, pieces: list[Piece]) -> bool:
        """Take one call, or the end of the list; False if there is nothing more to take."""
        text = self._text.lstrip(" \n\t,")
        if text.startswith("]"):
            self._state, self._text = "behind", text[1:]
            return False
        end = self._end.find(text)
        if end == -1:
            return False
        call = read_call(text[:end]) if end else None
        if call is None:
            self._state = "content"
            return False
        name, arguments = call
        pieces += [Piece(Kind.CALL, name), Piece(Kind.ARGUMENTS, json.dumps(arguments, ensure_ascii=False))]
        self._text, self._end = text[end:], CallEnd()
        return True


class ForcedParser:
    """What a grammar forces from its first character on: the arguments of one function, or an array of calls."""

    is_reasoning = False

    def __init__(self, name: str | None) -> None:
        """Take all of the output for arguments of `name`, or without it for an array of calls."""
        self._name = name
        self._is_begun = False
        self._body: CallBody | None = None if name is not None else JsonCalls()
        self._raw = ""

    @property
    def num_held(self) -> int:
        return 0 if self._body is None else self._body.num_held if self._body.is_announced else len(self._raw)

    def push(self, text: str) -> list[Piece]:
        if self._name is not None:
            pieces = [] if self._is_begun else [Piece(Kind.CALL, self._name)]
            self._is_begun = True
            return [*pieces, Piece(Kind.ARGUMENTS, text)]
        if self._body is None:
            return [Piece(Kind.CONTENT, text)] if text.strip() else []
        self._raw += "" if self._body.is_announced else text
        try:
            pieces, rest = self._body.push(text)
        except NotACallError:  # no grammar was there, or the tokens ran out
            self._body = None
            return [Piece(Kind.CONTENT, self._raw)]
        if rest is not None:
            self._body = None
            if rest.strip():
                pieces.append(Piece(Kind.CONTENT, rest))
        return pieces

    def flush(self) -> list[Piece]:
        if self._body is None:
            return []
        return self._body.flush() if self._body.is_announced else [Piece(Kind.CONTENT, self._raw)]
