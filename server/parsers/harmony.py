"""The channels of gpt-oss: thoughts, calls and answers as messages with headers."""

from __future__ import annotations

import re

from ftserve.server.parsers.marked import held_back
from ftserve.server.rich import Kind, Piece

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE = "<|message|>"
_HEADER_STARTS = ("<|start|>", "<|channel|>", "to=")
_MAX_HEADER_CHARS = 512


def _begins_header(text: str) -> bool:
    """Whether `text` begins as a header does, as far as it goes."""
    text = text.lstrip()
    return any(text.startswith(start[: len(text)]) for start in _HEADER_STARTS)


class HarmonyParser:
    """Reads messages `HEADER<|message|>TEXT<|end|>`; the prompt ends where the first header begins.

    Text on the analysis channel is a thought, text to `functions.NAME` the arguments of a call, all else content.
    """

    def __init__(self) -> None:
        self._text = ""  # not decided about
        self._kind: Kind | None = None  # of the message that is being read; None in a header

    @property
    def is_reasoning(self) -> bool:
        return self._kind is Kind.REASONING

    @property
    def num_held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and (self._read_header(pieces) if self._kind is None else self._read_text(pieces)):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._text = self._text, ""
        if self._kind is not None:
            return [Piece(self._kind, rest)] if rest else []
        return [Piece(Kind.CONTENT, rest)] if rest.strip() else []

    def _read_header(self, pieces: list[Piece]) -> bool:
        at = self._text.find(_MESSAGE)
        length = at if at >= 0 else len(self._text) - len(_MESSAGE)
        if not _begins_header(self._text) or length > _MAX_HEADER_CHARS:
            self._kind = Kind.CONTENT
            return True
        if at < 0:
            return False
        header = self._text[:at]
        self._text = self._text[at + len(_MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            self._kind = Kind.ARGUMENTS
            pieces.append(Piece(Kind.CALL, recipient[1].removeprefix("functions.")))
        else:
            self._kind = Kind.REASONING if channel is not None and channel[1] == "analysis" else Kind.CONTENT
        return True

    def _read_text(self, pieces: list[Piece]) -> bool:
        assert self._kind is not None, "the caller looked"
        found = _END.search(self._text)
        if found is not None:
            text, self._text = self._text[: found.start()], self._text[found.end() :]
        else:
            kept = held_back(self._text, _ENDS)
            text, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        if text:
            pieces.append(Piece(self._kind, text))
        if found is None:
            return False
        self._kind = None
        if found[0] == "<|start|>":
            self._text = found[0] + self._text
        return True
