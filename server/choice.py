"""One sequence's text on its way to the client: detokenizing, stop strings, and what was not written yet.

Owned by the output thread of its reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent
from ftserve.preprocess.text import Detokenizer, StopMatcher, make_detokenizer
from ftserve.preprocess.vocabulary import Vocabulary, json_escape
from ftserve.server.rich import RichOptions, RichText


class ChoiceEnd(NamedTuple):
    """Why a choice ended, as JSON."""

    finish_reason: str
    stop_reason: str  # the stop string or the id of the stop token that ended it, else null
    stop_token_id: int | None = None  # the token that ended it, of which there is no text


class Choice:
    """One sequence's text on its way to the client."""

    __slots__ = (
        "after",
        "before",
        "completion_tokens",
        "detokenizer",
        "finish_reason",
        "is_closed",
        "is_opened",
        "pending",
        "request",
        "rich",
        "stop_token_id",
        "stops",
    )

    def __init__(
        self, request: GenerationRequest, vocabulary: Vocabulary, rich_options: RichOptions | None = None
    ) -> None:
        self.request = request
        self.detokenizer: Detokenizer = make_detokenizer(vocabulary)
        self.stops = (
            StopMatcher(request.sampling.stop, include_stop=request.sampling.include_stop)
            if request.sampling.stop
            else None
        )
        self.rich = None if rich_options is None else RichText(rich_options, self.detokenizer, self.stops)
        self.pending: list[str] = []  # JSON-escaped text that was not written yet; all of it, when not streamed
        self.completion_tokens = 0
        self.stop_token_id: int | None = None
        self.finish_reason: FinishReason | None = None  # set once; later events are of no interest
        self.is_opened = self.is_closed = False  # its first and last event were written
        self.before = self.after = ""  # around the text of each event; set with `is_opened`

    def begin_with(self, text: str) -> None:
        """Have the text begin with one that was not generated."""
        if self.rich is not None:
            self.rich.begin_with(text)
        else:
            self.pending.append(json_escape(text))

    def push(self, token_ids: Sequence[int], escaped: list[str | None]) -> bool:
        """Take tokens; True if a stop string was found in their text."""
        if self.stops is None and not self.detokenizer.is_pending:
            pieces = [escaped[token_id] for token_id in token_ids]
            if None not in pieces:
                self.pending += pieces  # type: ignore[arg-type]  # no None is left
                return False
        return self._take(self.detokenizer.push(token_ids))

    def push_rich(self, token_ids: Sequence[int], event: TokenEvent) -> bool:
        """Do what `push` does for a choice with `rich`; `event` is where the tokens come from."""
        assert self.rich is not None, "it carries plain text"
        return self.rich.push(token_ids, event)

    def finish(self, reason: FinishReason) -> None:
        """End the choice; text that was held back comes out."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self.rich is not None:
                if self.rich.finish():
                    self.finish_reason = FinishReason.STOP
            elif self._take(self.detokenizer.flush()):
                self.finish_reason = FinishReason.STOP
            elif self.stops is not None:
                self.pending.append(json_escape(self.stops.flush()))

    def end(self) -> ChoiceEnd:
        """Return why it ended; after `finish`."""
        assert self.finish_reason is not None, "it has not ended"
        stop_reason = "null"
        if self.stops is not None and self.stops.matched is not None:
            stop_reason = f'"{json_escape(self.stops.matched)}"'
        elif self.stop_token_id in self.request.sampling.stop_token_ids:
            stop_reason = str(self.stop_token_id)
        reason = self.finish_reason.value
        if self.rich is not None and self.rich.ends_with_calls and self.finish_reason is FinishReason.STOP:
            reason = "tool_calls"
        return ChoiceEnd(f'"{reason}"', stop_reason, self.stop_token_id)

    def _take(self, text: str) -> bool:
        if self.stops is not None:
            text = self.stops.push(text)
        if text:
            self.pending.append(json_escape(text))
        return self.stops is not None and self.stops.matched is not None
