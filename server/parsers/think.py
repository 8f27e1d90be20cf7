"""Thoughts between two markers at the beginning of the output, and what follows them."""

from __future__ import annotations

from ftserve.server.parsers.marked import held_back
from ftserve.server.rich import Kind, OutputParser, Piece


class ThinkParser:
    """A thought, then content, which another parser may look into.

    White space around the thought is layout: the templates that put a thought back into a prompt strip it too.
    """

    def __init__(self, start: str, end: str, *, is_open: bool, then: OutputParser | None = None) -> None:
        """Begin inside of the thought if `is_open`, as the prompt has the start marker; else one may follow."""
        self._start = start
        self._end = end
        self._then = then
        self._text = ""  # not decided about
        self._state = "opened" if is_open else "before"  # opened, before, inside, behind, over
        self._is_open = is_open
        self._has_thought = False

    @property
    def is_reasoning(self) -> bool:
        return self._state in ("opened", "inside")

    @property
    def num_held(self) -> int:
        return len(self._text) + (self._then.num_held if self._then is not None else 0)

    def push(self, text: str) -> list[Piece]:
        if self._state == "over":
            return self._pass(text)
        self._text += text
        if self._state in ("before", "opened"):
            self._look_for_start()
        pieces = self._think() if self._state == "inside" else []
        if self._state == "behind":
            self._text = self._text.lstrip()
            if self._text:
                self._state = "over"
        if self._state == "over" and self._text:
            rest, self._text = self._text, ""
            pieces += self._pass(rest)
        return pieces

    def flush(self) -> list[Piece]:
        rest, self._text = self._text, ""
        if self.is_reasoning:
            rest = rest.rstrip()
            return [Piece(Kind.REASONING, rest)] if rest else []
        pieces = self._pass(rest) if self._state in ("before", "over") and rest else []
        return pieces + (self._then.flush() if self._then is not None else [])

    def _look_for_start(self) -> None:
        """Leave the beginning once it is clear whether the start marker stands there."""
        text = self._text.lstrip()
        if text.startswith(self._start):
            self._state, self._text = "inside", text[len(self._start) :]
        elif not self._start.startswith(text):
            self._state = "inside" if self._is_open else "over"

    def _think(self) -> list[Piece]:
        if not self._has_thought:
            self._text = self._text.lstrip()
        at = self._text.find(self._end)
        if at >= 0:
            thought, self._text = self._text[:at].rstrip(), self._text[at + len(self._end) :]
            self._state = "behind"
        else:
            kept = held_back(self._text, (self._end,))
            thought = self._text[: len(self._text) - kept].rstrip()
            self._text = self._text[len(thought) :]
        self._has_thought |= bool(thought)
        return [Piece(Kind.REASONING, thought)] if thought else []

    def _pass(self, text: str) -> list[Piece]:
        return [Piece(Kind.CONTENT, text)] if self._then is None else self._then.push(text)
