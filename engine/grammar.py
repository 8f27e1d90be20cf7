"""What output has to look like: JSON of a schema, a regular expression, a grammar; compiled by llguidance.

Guarantees: a source is either compiled or refused with `InvalidRequestError`, in bounded time and memory whatever it
says (`grammar_sandbox.py`). Any thread may call any method.

Whoever must not wait asks `GrammarCompiler.known`, and leaves what is not known to `compile_soon`.

Shared fields of `GrammarCompiler`: all under its lock, which is held for dictionary look-ups only, and while the
tokenizer is loaded; never per token.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftserve.engine.errors import (
    EngineRequestError,
    FtserveError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
)
from ftserve.engine.grammar_sandbox import TOO_COMPLEX, GrammarSandbox, compile_matcher, make_tokenizer
from ftserve.engine.threads import name_this_thread

log = logging.getLogger("ftserve.engine")

MAX_SOURCE_CHARS = 2**20
_NO_GRAMMARS = "This model has no tokenizer or no end of text that output could be held to a structure with."
_MAX_WAITING = 64  # for the thread that compiles
_MAX_CACHED = 64
_MAX_CACHED_CHARS = 4 * 2**20

# JSON as models write it in one line. Free white space would let a model go on with it to the end of its tokens.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,  # `oneOf` as `anyOf`: what pydantic writes for unions that a field tells apart
}

_REASONS = (  # what llguidance says, and what we make of it
    (r"Unimplemented keys: \[(.*)\]", "it uses keywords that are not supported: {}"),
    (r"Unknown format: (\S+)", "it uses a format that is not supported: {}"),
    (r"Invalid type: (\S+)", "there is no type {}"),
    (r"Unsatisfiable|is empty$", "nothing can satisfy it"),
    (r"Pointer '|Resource '|\$ref", "a reference leads nowhere"),
    (r"unknown name: \"(\w+)\"", "the rule {} is not defined"),
    (r"unknown special token", "it names a special token that the model does not have"),
    (r"look-?around|look-?behind", "regular expressions may not look around"),
    (r"backreferences", "regular expressions may not refer back"),
    (r"too (big|large|many|deeply|complex)|recursion limit|fuel|Unable to determine", f"it is {TOO_COMPLEX}"),
    (r"are not disjoint", "its pattern properties overlap"),
    (r"regex", "a regular expression in it is not valid"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled constraint, shared by every request that asks for the same. Compared by identity."""

    source: str  # as llguidance takes it: another process can compile it again
    vocab_size: int  # bits in its masks
    matcher: Any  # llguidance.LLMatcher at the beginning; nobody advances it, and `deep_copy` may run on any thread


class UnknownGrammarError(Exception):
    """A grammar has to be compiled first, which takes a while; `GrammarCompiler.compile_soon` does it."""

    def __init__(self, source: str, param: str | None, what: str) -> None:
        super().__init__()
        self.source = source
        self.param = param
        self.what = what


class GrammarMaker(ABC):
    """The ways to ask for a grammar."""

    @abstractmethod
    def compile(self, source: str, *, param: str | None, what: str) -> Grammar:
        """Return the grammar of what llguidance takes for one; `what` is its name in messages.

        Raises:
            InvalidRequestError: it is not one, or it is too complex.
        """

    def json_schema(self, schema: Mapping[str, Any] | bool, *, param: str | None = None) -> Grammar:
        """Compile a JSON schema; `param` is the request's field to blame.

        Raises:
            InvalidRequestError: it is no schema, nothing satisfies it, or it is too complex or uses what we lack.
        """
        source = schema_source(schema, param=param)
        return self.lark(f"start: %json {source}", param=param, what="schema")

    def json_object(self) -> Grammar:
        """Compile "any JSON object"."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str, *, param: str | None = None) -> Grammar:
        """Compile a regular expression that the whole output has to match.

        Raises:
            InvalidRequestError: it is not one, or it uses what derivatives of regular expressions cannot do.
        """
        from llguidance import regex_to_lark

        # "d": a digit is one of ten, as in JSON schemas; Unicode has hundreds, and a model may like odd ones.
        return self.lark(f"start: /{regex_to_lark(pattern, 'd')}/", param=param, what="regular expression")

    def choice(self, options: Sequence[str], *, param: str | None = None) -> Grammar:
        """Compile "one of these texts".

        Raises:
            InvalidRequestError: there are none, or too many.
        """
        if not options or "" in options:
            raise InvalidRequestError("Choices must be texts that are not empty.", param=param)
        texts = " | ".join(json.dumps(option) for option in options)
        return self.lark(f"start: CHOICE\nCHOICE: {texts}", param=param, what="list of choices")

    def lark(self, grammar: str, *, param: str | None = None, what: str = "grammar") -> Grammar:
        """Compile a grammar in llguidance's variant of Lark's language, which may hold `%json {schema}`.

        Raises:
            InvalidRequestError: it is not one, or it is too complex.
        """
        from llguidance import LLMatcher

        return self.compile(LLMatcher.grammar_from_lark(grammar), param=param, what=what)


class KnownGrammars(GrammarMaker):
    """Grammars that need no compiling. Never waits."""

    def __init__(self, find: Callable[[str], Grammar | None]) -> None:
        self._find = find

    def compile(self, source: str, *, param: str | None, what: str) -> Grammar:
        known = self._find(source)
        if known is None:
            raise UnknownGrammarError(source, param, what)
        return known


class GrammarCompiler(GrammarMaker):
    """Compiles constraints on the output of one model, and remembers the latest."""

    def __init__(self, tokenizer_json: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Prepare to compile; the tokenizer is read, and a helper process started, when they are first needed."""
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_token_ids)  # emptied if the tokenizer cannot be read
        self._sandbox = GrammarSandbox(tokenizer_json, vocab_size, self._eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._known: OrderedDict[str, Grammar] = OrderedDict()  # by source; the least recently used first
        self._thread = ThreadPoolExecutor(1, "ftserve-grammar", initializer=name_this_thread, initargs=("ft-grammar",))
        self._num_waiting = 0
        self.known = KnownGrammars(self._find)

    def compile_soon(
        self, unknown: UnknownGrammarError, is_wanted: Callable[[], bool], done: Callable[[FtserveError | None], None]
    ) -> None:
        """Compile on a thread of ours, which then calls `done`, with the reason if it did not work.

        Raises:
            OverloadedError: too many wait for it already.
        """
        with self._lock:
            if self._num_waiting >= _MAX_WAITING:
                raise OverloadedError("Too many grammars wait to be compiled.", retry_after_s=1)
            self._num_waiting += 1

        def run() -> None:
            error: FtserveError | None = None
            try:
                if is_wanted():
                    self.compile(unknown.source, param=unknown.param, what=unknown.what)
            except FtserveError as exc:
                error = exc
            except Exception as exc:  # a bug that one grammar hit
                log.exception("a grammar could not be compiled")
                error = EngineRequestError("The grammar of this request could not be compiled.")
                error.__cause__ = exc
            with self._lock:
                self._num_waiting -= 1
            done(error)

        try:
            self._thread.submit(run)
        except RuntimeError:  # closed
            raise RequestCancelledError("The server is stopping.") from None

    def warm_up(self) -> None:
        """Have read, on our thread, what the first grammar would otherwise wait for."""
        try:
            self.known.json_object()
        except UnknownGrammarError as unknown:
            with suppress(FtserveError):
                self.compile_soon(unknown, lambda: True, lambda _error: None)

    def compile_again(self, source: str) -> Grammar:
        """Compile the `source` of a `Grammar` that this class has made, maybe in another process.

        Raises:
            InvalidRequestError: it is not one.
        """
        known = self._find(source)
        if known is not None:
            return known
        matcher = compile_matcher(self._load_tokenizer(), source)
        if matcher.is_error():
            raise InvalidRequestError("This grammar cannot be compiled again.")
        return self._remember(Grammar(source, self._vocab_size, matcher))

    def close(self) -> None:
        """End our thread and the helper process; who waits for a grammar is told."""
        self._sandbox.close()
        self._thread.shutdown()

    def compile(self, source: str, *, param: str | None, what: str) -> Grammar:
        known = self._find(source)
        if known is not None:
            return known
        if not self._eos_ids:
            raise InvalidRequestError(_NO_GRAMMARS, param=param)
        if len(source) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(f"This {what} cannot be used: it is {TOO_COMPLEX}.", param=param)
        tokenizer = self._load_tokenizer()
        message = self._sandbox.find_error(source)
        known = self._find(source)  # a thread that was in the sandbox before us may have had the same
        if known is not None:
            return known
        if not message:
            matcher = compile_matcher(tokenizer, source)
            if not matcher.is_error():
                return self._remember(Grammar(source, self._vocab_size, matcher))
            message = matcher.get_error()
        raise InvalidRequestError(f"This {what} cannot be used: {_reason(message)}.", param=param)

    def _load_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = make_tokenizer(self._path, self._vocab_size, self._eos_ids)
                except Exception:  # what llguidance and tokenizers raise for files that they do not know
                    log.exception("llguidance cannot read the tokenizer of this model; grammars are refused")
                    self._eos_ids = []
                    raise InvalidRequestError(_NO_GRAMMARS) from None
            return self._tokenizer

    def _find(self, source: str) -> Grammar | None:
        with self._lock:
            found = self._known.get(source)
            if found is not None:
                self._known.move_to_end(source)
            return found

    def _remember(self, grammar: Grammar) -> Grammar:
        with self._lock:
            known = self._known
            known[grammar.source] = grammar
            while len(known) > _MAX_CACHED or (sum(map(len, known)) > _MAX_CACHED_CHARS and len(known) > 1):
                known.popitem(last=False)
        return grammar


def schema_source(schema: Mapping[str, Any] | bool, *, param: str | None = None) -> str:
    """Return a JSON schema as it may stand behind `%json` in a Lark grammar.

    Raises:
        InvalidRequestError: it is no JSON, or nested too deeply.
    """
    options = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    if options is not None:
        raise InvalidRequestError("A schema may not hold 'x-guidance'.", param=param)
    schema = {"x-guidance": _JSON_OPTIONS, **schema} if isinstance(schema, Mapping) else schema
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidRequestError("This schema cannot be used: it is nested too deeply.", param=param) from None


def _reason(message: str) -> str:
    """Return llguidance's `message` in words of ours: its own may show what is inside."""
    for pattern, reason in _REASONS:
        found = re.search(pattern, message)
        if found is not None:
            return reason.format(*(group[:200] for group in found.groups()))
    return "it is not valid"
