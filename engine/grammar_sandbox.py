"""Tries a grammar in a process that may be killed, before this one compiles it.

Compiling takes a millisecond or two, but nothing in llguidance bounds it: `multipleOf: 1000007` takes 9 s, an array of
a million items a gigabyte, and a chain of a few thousand references overflows the stack, which no process survives.
What passes within the limits of `sandbox.py` passes here, in the same time.

Any thread; one grammar is tried at a time.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from ftserve.engine.sandbox import Sandbox, SandboxLimitError, serve

CPU_SECONDS = 0.5
_WALL_SECONDS = 5.0  # of a loaded machine, for the same
_MEMORY_BYTES = 512 * 2**20
_STACK_BYTES = 2**20  # an eighth of what our threads have: about 200 references in a chain

TOO_COMPLEX = "too large or too complex"


def make_tokenizer(tokenizer_json: Path, vocab_size: int, eos_ids: list[int]) -> Any:
    """Return llguidance's view of a tokenizer, an `LLTokenizer`; takes a quarter of a second.

    Raises:
        ValueError: llguidance cannot read it.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(str(tokenizer_json), n_vocab=vocab_size, eos_token=eos_ids)


def compile_matcher(tokenizer: Any, source: str) -> Any:
    """Return an `LLMatcher` at the beginning of `source`; whether that is a grammar, its `is_error` tells."""
    from llguidance import LLMatcher, LLParserLimits

    # What one mask may cost: the others of the batch wait for it.
    limits = LLParserLimits(step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False)
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def find_error(tokenizer: Any, source: str) -> str:
    """Return llguidance's message if `source` is no grammar or its first mask fails; else nothing."""
    matcher = compile_matcher(tokenizer, source)
    if not matcher.is_error():
        copy = matcher.deep_copy()
        copy.compute_bitmask()
        return str(copy.get_error()) if copy.is_error() else ""
    return str(matcher.get_error())


class GrammarSandbox:
    """Where grammars are tried."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_ids: list[int]) -> None:
        arguments = [str(tokenizer_json), str(vocab_size), *map(str, eos_ids)]
        self._sandbox = Sandbox(__name__, arguments, wall_s=_WALL_SECONDS)

    def find_error(self, source: str) -> str:
        """Return what is wrong with a grammar, or nothing; `TOO_COMPLEX` if the limits do not suffice for it.

        Raises:
            EngineError: the helper process cannot be had.
        """
        try:
            return str(self._sandbox.ask(source))
        except SandboxLimitError:
            return TOO_COMPLEX

    def close(self) -> None:
        """End the helper process."""
        self._sandbox.close()


def main(tokenizer_json: str, vocab_size: str, *eos_ids: str) -> None:
    """Try the grammars of standard input."""
    tokenizer = make_tokenizer(Path(tokenizer_json), int(vocab_size), [int(token_id) for token_id in eos_ids])
    find_error(tokenizer, '{"grammars": [{"lark_grammar": "start: /a*/"}]}')  # loads what is loaded late
    serve(partial(find_error, tokenizer), cpu_s=CPU_SECONDS, memory_bytes=_MEMORY_BYTES, stack_bytes=_STACK_BYTES)


if __name__ == "__main__":
    main(*sys.argv[1:])
