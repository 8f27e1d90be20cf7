"""What each token id stands for, looked up once at start, so that detokenizing is a list look-up.

For byte-level tokenizers (GPT-2 style: Llama 3, Qwen, SmolLM) a token is a string of bytes; for byte-fallback
tokenizers (SentencePiece style: Llama 2, Mistral, Gemma) it is text, or one byte as `<0xNN>`. Both kinds are recognized
by the decoder that `tokenizer.json` names, and every entry is checked against the decoder itself; a tokenizer that
disagrees anywhere is served through `tokenizers`' own incremental decoder instead (`TokenKind.OPAQUE`).
"""

from __future__ import annotations

import enum
import json
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import Any

from tokenizers import Tokenizer

log = logging.getLogger("ftserve.preprocess")

SPACE_MARK = "▁"  # what SentencePiece writes for a space


class TokenKind(enum.Enum):
    BYTE_LEVEL = "byte_level"  # tokens are bytes that add up to UTF-8
    BYTE_FALLBACK = "byte_fallback"  # tokens are text, some are single bytes
    OPAQUE = "opaque"  # only the tokenizer's own decoder knows


def json_escape(text: str) -> str:
    """Return `text` as it stands between the quotes of a JSON string; non-ASCII stays as it is."""
    return encode_basestring(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tables by token id, of one length. Read by every output thread, written by none after `build_vocabulary`."""

    kind: TokenKind
    tokenizer: Tokenizer  # for OPAQUE; decoding takes no lock
    texts: list[str | None]  # the token's text if it is whole characters, else None
    escaped: list[str | None]  # the same as it stands in JSON
    raw: list[bytes | None]  # BYTE_LEVEL: every token's bytes; BYTE_FALLBACK: those of byte tokens, else None
    strips_first_space: bool  # the decoder drops one space at the very start
    skips_special: bool  # special tokens are no text
    max_token_chars: int  # characters of the longest token, as the vocabulary writes it
    hidden: frozenset[int] | None = None  # OPAQUE: the special tokens that are no text; None: all of them

    def __len__(self) -> int:
        return len(self.texts)

    def showing(self, markers: Collection[str]) -> Vocabulary:
        """Return a vocabulary in which `markers` are text, even those that are special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        specials = {token_id: token.content for token_id, token in added.items() if token.special}
        shown = {token_id: text for token_id, text in specials.items() if text in markers}
        if not shown:
            return self
        if self.kind is TokenKind.OPAQUE:
            return replace(self, hidden=frozenset(specials.keys() - shown.keys()))
        texts, escaped, raw = [*self.texts], [*self.escaped], [*self.raw]
        for token_id, text in shown.items():
            texts[token_id], escaped[token_id] = text, json_escape(text)
            raw[token_id] = text.encode() if self.kind is TokenKind.BYTE_LEVEL else None
        return replace(self, texts=texts, escaped=escaped, raw=raw)


def build_vocabulary(tokenizer: Tokenizer, *, skip_special_tokens: bool = True, size: int = 0) -> Vocabulary:
    """Build the tables of at least `size` ids (a model may have more ids than its tokenizer; those are no text)."""
    config = json.loads(tokenizer.to_str())
    kind, strips = _recognize(config["decoder"])
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    size = max(size, 1 + max(ids.values(), default=-1))
    if kind is not TokenKind.OPAQUE:
        vocabulary = _tabulate(tokenizer, config, kind, strips, skip_special_tokens, size)
        wrong = _first_disagreement(vocabulary, skip_special_tokens)
        if wrong is None:
            return vocabulary
        log.warning("token %d decodes unlike its table entry; using the tokenizer's own decoder", wrong)
    empty: list[Any] = [None] * size
    return Vocabulary(
        TokenKind.OPAQUE, tokenizer, empty, empty, empty, False, skip_special_tokens, max(map(len, ids), default=1)
    )


class VerbatimVocabulary:
    """A vocabulary in which special tokens are text, made when it is first asked for.

    Any thread. The lock is held while the tables are made, a fraction of a second; whoever asks meanwhile needs them.
    """

    def __init__(self, usual: Vocabulary) -> None:
        self._usual = usual
        self._lock = threading.Lock()
        self._made: Vocabulary | None = None

    def get(self) -> Vocabulary:
        with self._lock:
            if self._made is None:
                usual = self._usual
                self._made = build_vocabulary(usual.tokenizer, skip_special_tokens=False, size=len(usual))
            return self._made


def _recognize(decoder: dict[str, Any] | None) -> tuple[TokenKind, bool]:
    if decoder is None:
        return TokenKind.OPAQUE, False
    if decoder["type"] == "ByteLevel":
        return TokenKind.BYTE_LEVEL, False
    if decoder["type"] != "Sequence":
        return TokenKind.OPAQUE, False
    steps = [step["type"] for step in decoder["decoders"]]
    if steps == ["ByteLevel"]:
        return TokenKind.BYTE_LEVEL, False
    if steps[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[3:] not in ([], ["Strip"]):
        return TokenKind.OPAQUE, False
    replace = decoder["decoders"][0]
    if (replace["pattern"], replace["content"]) != ({"String": SPACE_MARK}, " "):
        return TokenKind.OPAQUE, False
    strip: dict[str, Any] = decoder["decoders"][3] if steps[3:] else {"start": 0, "stop": 0, "content": " "}
    if strip["stop"] or strip["start"] > 1 or strip["content"] != " ":
        return TokenKind.OPAQUE, False
    return TokenKind.BYTE_FALLBACK, strip["start"] == 1


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's table from printable character to byte.

    Bytes that are printable in Latin-1 stand for themselves; the others, in ascending order, are written as the
    characters from U+0100 on (Radford et al. 2019, `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + k): b for k, b in enumerate(hidden)}


def _tabulate(
    tokenizer: Tokenizer, config: dict[str, Any], kind: TokenKind, strips: bool, skip_special: bool, size: int
) -> Vocabulary:
    added = {token["id"]: token for token in config["added_tokens"]}
    alphabet = byte_level_alphabet()
    texts: list[str | None] = [""] * size
    raw: list[bytes | None] = [b"" if kind is TokenKind.BYTE_LEVEL else None] * size
    for content, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        token = added.get(token_id)
        if token is not None and token["special"] and skip_special:
            continue
        if kind is TokenKind.BYTE_LEVEL:
            raw[token_id] = data = _byte_level_bytes(content, alphabet)
            texts[token_id] = _whole_text(data)
        elif token is None and (byte := _fallback_byte(content)) is not None:
            raw[token_id], texts[token_id] = byte, None
        else:
            texts[token_id] = content.replace(SPACE_MARK, " ")
    escaped = [None if text is None else json_escape(text) for text in texts]
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return Vocabulary(kind, tokenizer, texts, escaped, raw, strips, skip_special, longest)


def _byte_level_bytes(content: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in content])
    except KeyError:  # an added token is written as it is
        return content.encode()


def _fallback_byte(content: str) -> bytes | None:
    if len(content) == 6 and content.startswith("<0x") and content.endswith(">"):
        try:
            return bytes([int(content[3:5], 16)])
        except ValueError:
            return None
    return None


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _first_disagreement(vocabulary: Vocabulary, skip_special: bool) -> int | None:
    """Return the first id whose text is not what the decoder makes of it, or None.

    Each id is decoded behind an anchor token, since decoders may treat the first token differently.
    """
    anchor = next((k for k, text in enumerate(vocabulary.texts) if text and text.strip() == text), None)
    if anchor is None:
        return 0
    known = [k for k, text in enumerate(vocabulary.texts) if text is not None]
    decoded = vocabulary.tokenizer.decode_batch([[anchor, k] for k in known], skip_special_tokens=skip_special)
    prefix = vocabulary.texts[anchor]
    for k, text in zip(known, decoded, strict=True):
        if text != f"{prefix}{vocabulary.texts[k]}":
            return k
    return None
