"""Tool calls between markers, in the middle of text: what the formats of most models have in common.

Patterns that match the beginning of a call are bounded in length, since they look at it again as it grows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from ftserve.server.rich import Kind, Piece


class NotACallError(Exception):
    """What follows a marker is no call. The text is handed over as content."""


class CallBody(Protocol):
    """Reads what stands behind a marker, up to the end of the call. One object a call."""

    @property
    def is_announced(self) -> bool:
        """Whether the name has been given out: there is no way back."""

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        """Return pieces, and the text behind the call once it has ended.

        Raises:
            NotACallError: it is none; only before it `is_announced`.
        """

    def flush(self) -> list[Piece]:
        """Return what was held back of a call that is cut off."""

    @property
    def num_held(self) -> int:
        """Characters taken and not decided about."""


class MarkedParser:
    """Content, with a call behind each opening marker.

    White space around calls is layout and is dropped, as long as nothing but calls surrounds it.
    """

    is_reasoning = False

    def __init__(
        self,
        openers: Sequence[str],
        closers: Sequence[str],
        make_body: Callable[[str], CallBody],
        *,
        layout: Sequence[str] = (),
    ) -> None:
        """Prepare; closers mean nothing behind a call, layout nowhere. `make_body` gets the opener it follows."""
        self._openers = openers
        self._layout = layout
        self._markers = (*openers, *closers, *layout)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))  # from the cache of `re`
        self._make_body = make_body
        self._tail = ""  # may be the beginning of a marker
        self._blank = ""  # white space that is shown if content follows
        self._has_content = self._is_behind_call = False
        self._body: CallBody | None = None
        self._opener = ""
        self._raw = ""  # what the body has taken, in case that it is no call

    @property
    def num_held(self) -> int:
        in_body = 0 if self._body is None else self._body.num_held if self._body.is_announced else len(self._raw)
        return len(self._tail) + len(self._blank) + in_body

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            text = self._push_content(text, pieces) if self._body is None else self._push_body(self._body, text, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        tail, self._tail = self._tail, ""
        self._show(tail, pieces)
        if self._body is not None:
            if self._body.is_announced:
                pieces += self._body.flush()
            else:
                self._show(self._opener + self._raw, pieces)
            self._body, self._raw = None, ""
        elif self._blank and not self._is_behind_call:
            pieces.append(Piece(Kind.CONTENT, self._blank))
        self._blank = ""
        return pieces

    def _push_content(self, text: str, pieces: list[Piece]) -> str:
        text, self._tail = self._tail + text, ""
        found = self._pattern.search(text)
        if found is None:
            held = held_back(text, self._markers)
            if held:
                self._tail = text[len(text) - held :]
                text = text[: len(text) - held]
            self._show(text, pieces)
            return ""
        self._show(text[: found.start()], pieces)
        marker = found[0]
        if marker in self._openers:
            self._body, self._opener, self._raw = self._make_body(marker), marker, ""
        elif marker not in self._layout and (self._has_content or not self._is_behind_call):
            self._show(marker, pieces)
        return text[found.end() :]

    def _push_body(self, body: CallBody, text: str, pieces: list[Piece]) -> str:
        if not body.is_announced:
            self._raw += text
        try:
            found, rest = body.push(text)
        except NotACallError:
            raw, self._body, self._raw = self._raw, None, ""
            self._show(self._opener, pieces)
            return raw
        pieces += found
        if body.is_announced:
            self._raw = ""
        if rest is None:
            return ""
        self._body, self._raw, self._blank = None, "", ""
        self._has_content, self._is_behind_call = False, True
        return rest

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if not self._has_content:
            if not text or text.isspace():
                self._blank += text
                return
            text, self._blank = self._blank + text, ""
            self._has_content, self._is_behind_call = True, False
        if text:
            pieces.append(Piece(Kind.CONTENT, text))


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], -len(marker) + 1 if len(text) >= len(marker) else 0)
        while at >= 0:
            if marker.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(marker[0], at + 1)
    return longest
