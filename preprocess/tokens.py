"""Text to token ids.

`fastokens` encodes 12 to 20 times faster than `tokenizers`. It is used where it can read the model's
`tokenizer.json` and gives the same ids on every probe below; otherwise `tokenizers` encodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

log = logging.getLogger("ftserve.preprocess")

Encode = Callable[[str, bool], list[int]]  # (text, add_special_tokens) -> token ids

LONG_TEXT_CHARS = 4096  # above this, encoding detaches from the interpreter so that it delays nobody's pause

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
        fast = _fastokens(path)
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
    return _fastokens(path) if use_fastokens else _exact(load_tokenizer(path))


def _fastokens(path: Path) -> Encode:
    from fastokens import Tokenizer as FastTokenizer

    encode = FastTokenizer.from_file(str(path)).encode
    return lambda text, add_special_tokens: encode(text, add_special_tokens).ids


def _exact(tokenizer: Tokenizer) -> Encode:
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > LONG_TEXT_CHARS:
            return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    return encode
