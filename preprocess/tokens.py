"""Text to token ids.

`fastokens` encodes 12 to 20 times faster than `tokenizers`. It is used where it can read the model's
`tokenizer.json` and gives the same ids on every probe below; otherwise `tokenizers` encodes.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex
from tokenizers import Tokenizer

log = logging.getLogger("ftserve.preprocess")

ID_TYPECODE = "I"  # of `array`: uint32

Encode = Callable[[str, bool], "array[int]"]  # (text, add_special_tokens) -> token ids

LONG_TEXT_CHARS = 4096  # above this, encoding detaches from the interpreter so that it delays nobody's pause

_ASCII_DIGIT = re.compile("([0-9])")
_NON_ASCII = re.compile("[^\x00-\x7f]+")
_OTHER_DIGITS = regex.compile(r"[[\p{N}\p{Cn}]--[0-9]]", regex.VERSION1)

PROBES = (
    "Hello, world! It's 12:45 on 2024-03-01; that'll cost $1,234.56 (or 3/4 of it).",
    "  leading, trailing and    inner   spaces  \t\ttabs\r\n\r\nnew\n\n\nlines\u00a0nbsp\u2003em\u3000ideographic ",
    "naïve café Ångström Straße İstanbul ﬁne ½ ² Ω≈ç√∫ e\u0301 a\u0308 \u200b\u200d\ufeff",
    "日本語の文章。中文字符测试；한국어 문장 العربية עברית हिन्दी ไทย ქართული 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",  # noqa: RUF001 - odd characters are the point
    "🙂👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 ‼️ ©®™ \u0000\u0001\u001f\u007f\u0085 \u202e\u2066",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF], \"b\": x**2}  # comment\n\tif a<=b && c!=d: pass;;",
    "a" * 300 + " " + "=" * 200 + " " + "ab" * 150 + " " + "0123456789" * 12 + " " * 130 + "\n" * 40,
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><s>[INST] x [/INST]</s><bos><unk><pad><think></think>",
    "don't DON'T we'Ve I'LL I’ll CamelCaseWord snake_case_word HTTPServerError404 x1y2z3 \\u00e9 &amp; %20",  # noqa: RUF001
    "",
)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read `tokenizer.json`; truncation and padding are switched off, since they are state that encodes share."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def fastokens_is_exact(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether fastokens reads this tokenizer and agrees with `tokenizers` on every probe."""
    try:
        fast = make_encoder(path, use_fastokens=True)
    except ImportError:
        return False
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # noqa: BLE001 - it raises, or panics, on models it does not know
        log.info("fastokens does not take this tokenizer: %s", type(exc).__name__)
        return False
    specials = "".join(token.content for token in tokenizer.get_added_tokens_decoder().values())
    for probe in (*PROBES, specials[:4000]):
        for add_special_tokens in (False, True):
            if fast(probe, add_special_tokens) != _exact(tokenizer)(probe, add_special_tokens):
                log.info("fastokens disagrees with tokenizers on a probe; not using it")
                return False
    return True


def make_encoder(path: Path, *, use_fastokens: bool) -> Encode:
    """Return an encoder for the calling thread alone."""
    if not use_fastokens:
        return _exact(load_tokenizer(path))
    fast = _fastokens(path)

    def encode(text: str, add_special_tokens: bool) -> array[int]:
        try:
            return fast(text, add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - it raises, or panics, on a byte that the vocabulary lacks, such as 0x16
            return _last_resort(path)(text, add_special_tokens)

    return encode


@functools.lru_cache(maxsize=1)
def _last_resort(path: Path) -> Encode:
    """Return the encoder that all threads share for what fastokens fails on; `tokenizers` drops such bytes."""
    return _exact(load_tokenizer(path))


def _fastokens(path: Path) -> Encode:
    source = path.read_text(encoding="utf-8")
    config = json.loads(source)
    if not _splits_digits(config):
        return _flat_encoder(source)
    config["pre_tokenizer"] = config["pre_tokenizer"]["pretokenizers"][1]
    return _digit_splitter(_rarely_used(source), _flat_encoder(json.dumps(config)))


@functools.lru_cache(maxsize=1)
def _rarely_used(source: str) -> Encode:
    """Return one encoder for all threads: each takes 30 MB, and shared it is only slower, by a quarter with two."""
    return _flat_encoder(source)


def _flat_encoder(source: str) -> Encode:
    """Return a fastokens encoder that makes one array of the ids, and no Python integer for each."""
    from fastokens import Tokenizer as FastTokenizer

    encode_flat = FastTokenizer.from_json_str(source).encode_batch_flat

    def encode(text: str, add_special_tokens: bool) -> array[int]:
        ids, _offsets = encode_flat([text], add_special_tokens)
        return array(ID_TYPECODE, ids)

    return encode


def _splits_digits(config: dict[str, Any]) -> bool:
    """Whether digits are split off first, then the text is cut as GPT-2 does (SmolLM, StarCoder 2, Granite).

    fastokens has a fast path for GPT-2's rule and none for the two in sequence. Cutting at digits ourselves is the
    same if nothing looks across the cut: no normalizer, and added tokens that hold no digit and match literally.
    """
    steps = (config["pre_tokenizer"] or {}).get("pretokenizers", [])
    return (
        [step["type"] for step in steps] == ["Digits", "ByteLevel"]
        and steps[0]["individual_digits"]
        and steps[1]["use_regex"]
        and not steps[1]["add_prefix_space"]
        and config["normalizer"] is None
        and config["post_processor"] is None
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or any(map(str.isnumeric, token["content"]))
            for token in config["added_tokens"]
        )
    )


def _digit_splitter(encode_any: Encode, encode_rest: Encode) -> Encode:
    """Return an encoder that looks digits up and gives the text between them to `encode_rest`.

    ASCII digits only: which other characters are digits depends on the Unicode version, so text that may hold one
    goes to `encode_any`.
    """
    digits = {str(digit): encode_any(str(digit), False) for digit in range(10)}

    def encode(text: str, add_special_tokens: bool) -> array[int]:
        if not text.isascii() and _OTHER_DIGITS.search("".join(_NON_ASCII.findall(text))):
            return encode_any(text, add_special_tokens)
        if not any(digit in text for digit in digits):  # ten scans by memchr are nothing beside one by `re`
            return encode_rest(text, add_special_tokens)
        ids = array(ID_TYPECODE)
        for piece in _ASCII_DIGIT.split(text):
            if piece:
                ids += digits.get(piece) or encode_rest(piece, False)
        return ids

    return encode


def _exact(tokenizer: Tokenizer) -> Encode:
    def encode(text: str, add_special_tokens: bool) -> array[int]:
        if len(text) > LONG_TEXT_CHARS:
            encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return array(ID_TYPECODE, encoding.ids)

    return encode
