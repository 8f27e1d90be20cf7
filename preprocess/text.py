"""Tokens to text, incrementally, and stop strings. One object a sequence, owned by one output thread.

The concatenation of what `push` and `flush` return does not depend on how the tokens were grouped, and equals the
tokenizer's decoding of all of them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from ftserve.preprocess.vocabulary import TokenKind, Vocabulary

_REPLACEMENT = "�"
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    is_pending: bool  # tokens to come cannot be looked up one by one, because of those that came

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now; incomplete characters wait."""

    def flush(self) -> str:
        """Return what is left at the end; an incomplete character becomes U+FFFD."""


def make_detokenizer(vocabulary: Vocabulary) -> Detokenizer:
    """Return a fresh detokenizer for one sequence."""
    if vocabulary.kind is TokenKind.BYTE_LEVEL:
        return ByteLevelDetokenizer(vocabulary)
    if vocabulary.kind is TokenKind.BYTE_FALLBACK:
        return ByteFallbackDetokenizer(vocabulary)
    return StreamDetokenizer(vocabulary)


class ByteLevelDetokenizer:
    """Joins bytes; a character that tokens split waits in an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_raw", "_texts", "is_pending")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = vocabulary.texts
        self._raw = vocabulary.raw
        self._decoder = _utf8_decoder("replace")
        self.is_pending = False  # a character is incomplete

    def push(self, token_ids: Sequence[int]) -> str:
        if not self.is_pending:
            texts = self._texts
            parts = [texts[token_id] for token_id in token_ids]
            if None not in parts:
                return "".join(parts)  # type: ignore[arg-type]  # no None is left
        raw = self._raw
        text = self._decoder.decode(b"".join([raw[token_id] for token_id in token_ids]))  # type: ignore[misc]
        self.is_pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.is_pending = False
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Joins texts; runs of byte tokens that are no UTF-8 become one U+FFFD a byte, as `ByteFallback` does."""

    __slots__ = ("_at_start", "_pending", "_raw", "_texts", "is_pending")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = vocabulary.texts
        self._raw = vocabulary.raw
        self._pending = b""  # the bytes of an incomplete character
        self._at_start = vocabulary.strips_first_space
        self.is_pending = self._at_start

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            byte = self._raw[token_id]
            if byte is not None:
                parts.append(self._push_byte(byte))
            elif piece := self._texts[token_id]:
                parts.append(self._give_up() + piece)
        text = self._strip("".join(parts))
        self.is_pending = self._at_start or bool(self._pending)
        return text

    def flush(self) -> str:
        return self._strip(self._give_up())

    def _push_byte(self, byte: bytes) -> str:
        self._pending += byte
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as exc:
            if exc.reason == "unexpected end of data":
                return ""
            return self._give_up()
        self._pending = b""
        return text

    def _give_up(self) -> str:
        text, self._pending = _REPLACEMENT * len(self._pending), b""
        return text

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StreamDetokenizer:
    """`tokenizers`' own incremental decoder, for tokenizers that no table describes."""

    __slots__ = ("_emitted", "_hidden", "_ids", "_skips_special", "_stream", "_tokenizer", "is_pending")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_pending = True
        self._tokenizer = vocabulary.tokenizer
        self._hidden = vocabulary.hidden
        self._skips_special = vocabulary.skips_special and self._hidden is None
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        self._ids: list[int] = []
        self._emitted = 0  # characters

    def push(self, token_ids: Sequence[int]) -> str:
        if self._hidden is not None:
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        text = "".join([self._stream.step(self._tokenizer, token_id) or "" for token_id in token_ids])
        self._ids.extend(token_ids)
        self._emitted += len(text)
        return text

    def flush(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skips_special)[self._emitted :]


class StopMatcher:
    """Finds stop strings in text that arrives in pieces.

    The match that completes earliest wins, ties go to the earlier entry of the list. Text that may still become a
    match is held back, by characters.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)  # non-empty strings
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None  # the stop string that was found; text after it is dropped

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the text that may be shown; look at `matched` after each call."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = min(
            ((at + len(stop), k) for k, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0), default=None
        )
        if found is not None:
            end, k = found
            self.matched, self._held = self._stops[k], ""
            return text[: end if self._include else end - len(self._stops[k])]
        hold = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return what was held back; the text has ended without a match."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
