"""The slow path of a choice: text that is more than text, and tokens that belong to it.

A choice that carries reasoning, tool calls, log-probabilities or token ids has a `RichText`. It takes the batches of
tokens that come from the engine and makes `Delta`s of them. A streamed answer writes each delta as an event; a whole
answer is the `Message` that the same deltas add up to. A choice without any of these has none, and pays nothing.

    tokens ─▶ detokenizer ─▶ parser (`server/parsers`) ─▶ stop strings ─▶ deltas
                             pieces by kind               in content only

Guarantees:
    - The message does not depend on how tokens were grouped into batches.
    - Each token is in exactly one delta: the one that shows the last character it made. A token that made no text
      (markers, parts of a character) goes with the text that follows; at the end, what is left goes with the last
      delta. So the deltas' `token_ids` and `logprobs` are in order and complete, and belong to their text.
    - Stop strings match what the client sees as content. Thoughts, arguments and markers cannot be cut by one.

Owned by the output thread of its reply. To carry something else for each token: give `Token` a field, fill it in
`RichText.push`, and write it in `rich_delta` and `rich_choice` of the formats.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ftserve.engine.types import TokenEvent, TokenLogprobs
from ftserve.preprocess.text import Detokenizer, StopMatcher

_ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Kind(enum.Enum):
    """What a piece of output is."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()  # a tool call begins; the text is the function's name, whole
    ARGUMENTS = enum.auto()  # of the call that began last; as JSON


class Piece(NamedTuple):
    """A part of the output, as a parser finds it."""

    kind: Kind
    text: str


class OutputParser(Protocol):
    """Finds reasoning and tool calls in text that arrives in pieces of any size. One object a choice.

    It never raises for what a model says. What it cannot parse it hands over as content, so that no text is lost.
    """

    @property
    def num_held(self) -> int:
        """Characters taken and not decided about."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character belongs to a thought, or to its end."""

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now."""

    def flush(self) -> list[Piece]:
        """Return what was held back; the text has ended."""


def make_call_id() -> str:
    """Return a fresh id for a tool call, in the form that OpenAI's have."""
    return "call_" + "".join(random.choices(_ID_ALPHABET, k=24))  # noqa: S311 - no secret


@dataclass(frozen=True, slots=True)
class RichOptions:
    """What the choices of one request carry besides text. Immutable, shared by them."""

    make_parser: Callable[[], OutputParser] | None = None
    make_call_id: Callable[[], str] = make_call_id
    max_calls: int | None = None  # a call beyond these ends the choice
    is_call_forced: bool = False  # by a named `tool_choice`: calls are then no finish reason
    echo: Callable[[TokenEvent], list[Token]] | None = None  # the tokens of the text that `begin_with` was given
    keeps_tokens: bool = False  # deltas carry the ids of their tokens, and the logprobs where the engine gives them


class Token(NamedTuple):
    """A generated token as deltas carry it."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int  # characters of the text that the detokenizer had made before it


@dataclass(slots=True, eq=False)
class Delta:
    """What one event of a stream says: text of one kind, and the tokens that end in it."""

    kind: Kind
    texts: list[str]  # joined they are its text
    call_index: int = -1  # CALL, ARGUMENTS: which of the choice's calls
    call_id: str = ""  # CALL
    tokens: list[Token] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    call_id: str
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(slots=True)
class Message:
    """What the deltas of a choice add up to."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    tokens: list[Token]
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    deltas: Sequence[Delta] = field(default=(), compare=False, repr=False)  # in their order

    @classmethod
    def of(cls, deltas: Sequence[Delta], prompt_logprobs: Sequence[TokenLogprobs | None] | None = None) -> Message:
        texts: dict[Kind, list[str]] = {kind: [] for kind in Kind}
        calls: list[ToolCall] = []
        for delta in deltas:
            if delta.kind is Kind.CALL:
                calls.append(ToolCall(delta.call_id, delta.text, ""))
            elif delta.kind is Kind.ARGUMENTS:
                calls[delta.call_index].arguments += delta.text
            else:
                texts[delta.kind] += delta.texts
        tokens = [token for delta in deltas for token in delta.tokens]
        content, reasoning = "".join(texts[Kind.CONTENT]), "".join(texts[Kind.REASONING])
        return cls(content, reasoning, calls, tokens, prompt_logprobs, deltas)


class RichText:
    """Makes deltas of one choice's tokens."""

    __slots__ = (
        "_detokenizer",
        "_is_ended",
        "_num_taken",
        "_options",
        "_parser",
        "_stops",
        "_unplaced",
        "num_calls",
        "num_reasoning_tokens",
        "pending",
        "prompt_logprobs",
    )

    def __init__(self, options: RichOptions, detokenizer: Detokenizer, stops: StopMatcher | None) -> None:
        self.pending: list[Delta] = []  # not written yet; all of them, when not streamed
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self._options = options
        self._detokenizer = detokenizer
        self._stops = stops
        self._parser = options.make_parser() if options.make_parser is not None else None
        self._is_ended = False
        self._num_taken = 0  # characters that the detokenizer made
        self._unplaced: deque[tuple[int, Token]] = deque()  # with the number of characters that must be shown first

    @property
    def ends_with_calls(self) -> bool:
        """Whether tool calls are why the choice ended, if it ended by itself."""
        return self.num_calls > 0 and not self._options.is_call_forced

    def begin_with(self, text: str) -> None:
        """Have the content begin with a text that was not generated."""
        if text:
            self._emit(Kind.CONTENT, text)
            self._num_taken = len(text)

    def push(self, token_ids: Sequence[int], event: TokenEvent) -> bool:
        """Take the tokens of `event` that are text; True if the choice ends here: a stop string, or a call too many."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
            if self._options.echo is not None and self.pending:
                self.pending[0].tokens += self._options.echo(event)
        if self._push(token_ids, event.logprobs):
            self._end()
        return self._is_ended

    def finish(self) -> bool:
        """Take what was held back, as the text has ended; True if it ends earlier, by a stop string."""
        if self._is_ended:
            return False
        is_stopped = self._take(self._detokenizer.flush())
        if not is_stopped and self._parser is not None:
            is_stopped = self._add(self._parser.flush())
        if not is_stopped and self._stops is not None:
            self._emit(Kind.CONTENT, self._stops.flush())
        self._end()
        return is_stopped

    def take(self) -> list[Delta]:
        """Return the deltas that were not written yet."""
        deltas, self.pending = self.pending, []
        return deltas

    def _push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> bool:
        """Take tokens; one by one where it matters which of them made a text."""
        parser = self._parser
        if not self._options.keeps_tokens:
            at = 0
            while parser is not None and parser.is_reasoning and at < len(token_ids):
                self.num_reasoning_tokens += 1
                if self._take(self._detokenizer.push(token_ids[at : at + 1])):
                    return True
                at += 1
            return self._take(self._detokenizer.push(token_ids[at:] if at else token_ids))
        for k, token_id in enumerate(token_ids):
            if parser is not None:
                self.num_reasoning_tokens += parser.is_reasoning
            text = self._detokenizer.push((token_id,))
            token = Token(token_id, logprobs[k] if logprobs else None, self._num_taken)
            self._num_taken += len(text)
            self._unplaced.append((self._num_taken if text else self._num_taken + 1, token))
            if self._take(text):
                return True
        return False

    def _end(self) -> None:
        """Give the tokens that are left to the last delta, after the last text."""
        self._is_ended = True
        if self._unplaced:
            if not self.pending:
                self.pending.append(Delta(Kind.CONTENT, []))
            self.pending[-1].tokens += [token for _, token in self._unplaced]
            self._unplaced.clear()

    def _take(self, text: str) -> bool:
        if not text:
            return False
        pieces = [Piece(Kind.CONTENT, text)] if self._parser is None else self._parser.push(text)
        return self._add(pieces)

    def _add(self, pieces: Sequence[Piece]) -> bool:
        stops, has_emitted = self._stops, False
        for kind, text in pieces:
            shown = text
            if stops is not None:
                if kind is Kind.CONTENT:
                    shown = stops.push(text)
                elif held := stops.flush():  # no content follows directly: it cannot become a match
                    has_emitted = self._emit(Kind.CONTENT, held)
            if kind is Kind.CALL and self.num_calls == self._options.max_calls:
                return True
            has_emitted |= self._emit(kind, shown)
            if stops is not None and stops.matched is not None:
                return True
        if has_emitted and self._unplaced:
            self._place()
        return False

    def _emit(self, kind: Kind, text: str) -> bool:
        """Add text to the last delta if it is of its kind, else as a new one; False if there is none."""
        if kind is Kind.CALL:
            call_id = self._options.make_call_id()
            self.pending.append(Delta(kind, [text], self.num_calls, call_id))
            self.num_calls += 1
        elif not text:
            return False
        elif self.pending and self.pending[-1].kind is kind:
            self.pending[-1].texts.append(text)
        else:
            self.pending.append(Delta(kind, [text], self.num_calls - 1 if kind is Kind.ARGUMENTS else -1))
        return True

    def _place(self) -> None:
        """Give the tokens whose text is shown to the delta that shows it."""
        num_shown = self._num_taken
        if self._parser is not None:
            num_shown -= self._parser.num_held
        if self._stops is not None:
            num_shown -= self._stops.num_held
        tokens, unplaced = self.pending[-1].tokens, self._unplaced
        while unplaced and unplaced[0][0] <= num_shown:
            tokens.append(unplaced.popleft()[1])
