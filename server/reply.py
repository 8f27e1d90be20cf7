"""The answer to one generation request as it grows, streamed or whole, from the same events.

Owned by one output thread from submit to end; no other thread touches a `Reply` after it was submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ftserve.engine.client import Engine
from ftserve.engine.errors import EngineError, RequestCancelledError
from ftserve.engine.types import FinishReason, GenerationRequest, RequestTimes, TokenEvent, Usage
from ftserve.preprocess.vocabulary import Vocabulary
from ftserve.server.choice import Choice, ChoiceEnd
from ftserve.server.exchange import Exchange, is_lost
from ftserve.server.extras import Extras
from ftserve.server.problems import JSON_HEADERS, Problem, problem_of
from ftserve.server.rich import Delta, Message, RichOptions

SSE_HEADERS = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
DONE = "data: [DONE]\n\n"


class ReplyFormat(Protocol):
    """How an endpoint writes its answers. Text arrives JSON-escaped; events are whole SSE events."""

    extras: Extras  # set before the request is submitted
    done: str  # what ends a stream behind its last event

    def opening(self, index: int) -> str:
        """Return the events before a choice's first text."""

    def delta(self, index: int) -> tuple[str, str]:
        """Return what stands before and after the text in an event that carries text."""

    def closing(self, index: int, end: ChoiceEnd) -> str:
        """Return the event that ends a choice."""

    def last(self, usage: Usage) -> str:
        """Return the last event, with counts and timings as far as they were asked for."""

    def failure(self, problem: Problem) -> str:
        """Return the events that end a stream early."""

    def rich_delta(self, index: int, delta: Delta) -> str:
        """Return the event for a delta of a choice that carries more than text, see `server/rich.py`."""

    def choice(self, index: int, escaped: str, end: ChoiceEnd) -> str:
        """Return a choice of an answer that is not streamed."""

    def rich_choice(self, index: int, message: Message, end: ChoiceEnd) -> str:
        """Return the same for a choice that carries more than text."""

    def whole(self, choices: Sequence[str], usage: Usage) -> str:
        """Return the body of an answer that is not streamed, of what the two above returned."""


class Reply:
    """Collects the events of all choices of one request and writes them."""

    __slots__ = (
        "_bytes_left",
        "_escaped",
        "_format",
        "_include_usage",
        "_is_dirty",
        "_is_streamed",
        "_num_open",
        "_only",
        "_prompt_tokens",
        "_resume",
        "_transport",
        "cached_tokens",
        "choices",
        "engine",
        "error",
        "exchange",
        "flow",
        "is_done",
    )

    def __init__(
        self,
        exchange: Exchange,
        engine: Engine,
        reply_format: ReplyFormat,
        vocabulary: Vocabulary,
        *,
        is_streamed: bool,
        include_usage: bool,
        max_bytes: int,
    ) -> None:
        self.exchange = exchange
        self.engine = engine
        self.choices: list[Choice] = []
        self.cached_tokens = 0
        self.error: BaseException | None = None
        self.is_done = False
        self._format = reply_format
        self._escaped = vocabulary.escaped
        self._is_streamed = is_streamed
        self._include_usage = include_usage
        self._bytes_left = max_bytes
        self._prompt_tokens = 0
        self._num_open = 0
        self._only: Choice | None = None  # the single choice of a stream
        self._is_dirty = False
        self._transport: Any = None
        self.flow: Callable[[int], bool] | None = None  # set while a stream is in full flow, see `_make_flow`
        self._resume: Callable[[int], bool] | None = None  # the same, kept while it is out of use

    def expect(
        self,
        requests: Sequence[GenerationRequest],
        vocabulary: Vocabulary,
        prompt_tokens: int,
        rich_options: RichOptions | None = None,
    ) -> None:
        """Say which requests belong to this reply, in the order of their index. Before they are submitted."""
        self.choices = [Choice(request, vocabulary, rich_options) for request in requests]
        self._num_open = len(self.choices)
        is_plain_stream = self._is_streamed and rich_options is None
        self._only = self.choices[0] if is_plain_stream and len(self.choices) == 1 else None
        self._prompt_tokens = prompt_tokens

    def begin_with(self, texts: Sequence[str]) -> None:
        """Have each choice's text begin with a text that was not generated. After `expect`, before the submit."""
        for choice, text in zip(self.choices, texts, strict=True):
            choice.begin_with(text)

    def feed(self, event: TokenEvent) -> bool:
        """Take one event; True if the caller shall `flush` this reply once it has fed the whole batch."""
        self.flow = None
        choice = self.choices[event.request.index]
        if choice.finish_reason is not None:
            return False
        token_ids = event.token_ids
        if token_ids:
            choice.completion_tokens += len(token_ids)
            if event.stop_token_id is not None:
                choice.stop_token_id = event.stop_token_id
                token_ids = token_ids[:-1]
            is_stopped = (
                choice.push(token_ids, self._escaped) if choice.rich is None else choice.push_rich(token_ids, event)
            )
            if is_stopped:
                self._close(choice, FinishReason.STOP)
                if event.finish_reason is None:
                    self.engine.cancel(choice.request)
        if event.finish_reason is not None:
            self._end(choice, event)
        elif event.num_cached_tokens:
            self.cached_tokens += event.num_cached_tokens
        if self._is_dirty or not (self._is_streamed or self._num_open == 0):
            return False
        self._is_dirty = True
        return True

    def _end(self, choice: Choice, event: TokenEvent) -> None:
        self.cached_tokens += event.num_cached_tokens
        if choice.finish_reason is not None:  # a stop string in its last tokens has closed it
            return
        if event.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._fail(event)
        elif event.finish_reason is not None:
            self._close(choice, event.finish_reason)

    def _close(self, choice: Choice, reason: FinishReason) -> None:
        choice.finish(reason)
        self._num_open -= 1

    def _fail(self, event: TokenEvent) -> None:
        """One choice failed: the request has no whole answer, so the others are given up."""
        self.error = event.error or RequestCancelledError("The request was cancelled.")
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = event.finish_reason
                if choice.request is not event.request:
                    self.engine.cancel(choice.request)
        self._num_open = 0

    def flush(self) -> None:
        """Write what the batch brought."""
        self._is_dirty = False
        if self._num_open == 1 and self._only is not None and self._only.is_opened:
            self._write_text(self._only)
            if self._only.stops is None and not self._only.detokenizer.is_pending:
                self.flow = self._resume = self._resume or self._make_flow(self._only)
        elif self.is_done or (self.exchange.is_cancelled and self._num_open):
            return  # nobody listens; the final events are on their way
        elif self.error is not None:
            self._write_error(self.error)
        elif self._is_streamed:
            self._write_events()
        else:
            self._write_whole()

    def _write_text(self, choice: Choice) -> None:
        pending = choice.pending
        text = pending[0] if len(pending) == 1 else "".join(pending)
        if text:
            choice.pending = []
            self._send(f"{choice.before}{text}{choice.after}")

    def _make_flow(self, choice: Choice) -> Callable[[int], bool]:
        """Return a function that writes the next token of a stream; False if that takes `feed` and `flush`.

        It does what they do for the commonest case. It is a closure because this runs for each token of each stream,
        and on 3.13t, which does not specialize, every attribute is looked up in its type each time: over thirty
        look-ups there are seven here.
        """
        escaped, before, after, send = self._escaped, choice.before, choice.after, self._transport.send_str
        cancel, bytes_left = self.exchange.cancel, self._bytes_left

        def write(token_id: int) -> bool:
            nonlocal bytes_left
            text = escaped[token_id]
            if text is None:
                return False
            choice.completion_tokens += 1
            if text:
                chunk = f"{before}{text}{after}"
                bytes_left -= len(chunk)
                if is_lost(send(chunk)) or bytes_left < 0:
                    cancel()
            return True

        return write

    def _write_events(self) -> None:
        parts: list[str] = []
        for choice in self.choices:
            if choice.completion_tokens and not choice.is_closed:
                self._write_choice(choice, parts)
        if self._num_open == 0:
            if self._include_usage:
                parts.append(self._format.last(self.usage()))
            parts.append(self._format.done)
        if parts:
            self._send("".join(parts))
        if self._num_open == 0:
            self._finish()

    def _write_choice(self, choice: Choice, parts: list[str]) -> None:
        index = choice.request.index
        if not choice.is_opened:
            choice.is_opened = True
            choice.before, choice.after = self._format.delta(index)
            parts.append(self._format.opening(index))
        if choice.rich is not None:
            parts += [self._format.rich_delta(index, delta) for delta in choice.rich.take()]
        elif text := "".join(choice.pending):
            choice.pending = []
            parts.append(f"{choice.before}{text}{choice.after}")
        if choice.finish_reason is not None:
            choice.is_closed = True
            parts.append(self._format.closing(index, choice.end()))

    def _send(self, text: str) -> None:
        if self._transport is None:
            self._transport = self.exchange.open_stream(SSE_HEADERS)
        self._bytes_left -= len(text)
        if is_lost(self._transport.send_str(text)) or self._bytes_left < 0:
            self.exchange.cancel()

    def _write_whole(self) -> None:
        choices = [self._whole_choice(choice) for choice in self.choices]
        headers = [*JSON_HEADERS, ("server-timing", server_timing(self.times))]
        self.exchange.respond(200, headers, self._format.whole(choices, self.usage()))
        self._finish()

    def _whole_choice(self, choice: Choice) -> str:
        index, end = choice.request.index, choice.end()
        if choice.rich is not None:
            return self._format.rich_choice(index, Message.of(choice.rich.take(), choice.rich.prompt_logprobs), end)
        return self._format.choice(index, "".join(choice.pending), end)

    def _write_error(self, error: BaseException) -> None:
        problem = problem_of(error, self.exchange.request_id)
        if self._transport is None:
            self.exchange.refuse(problem)
        else:
            self._send(self._format.failure(problem) + self._format.done)
        self._finish()

    def _finish(self) -> None:
        self.is_done = True
        self.flow = self._resume = None
        self._transport = None  # the stream ends with its last reference, which must go before the exchange
        self.exchange.end()

    def give_up(self) -> None:
        """End after a failure of our own while writing; the engine forgets the request. Output thread."""
        if not self.is_done:
            self.error = self.error or RuntimeError("the reply could not be written")
            for choice in self.choices:
                choice.finish_reason = choice.finish_reason or FinishReason.ERROR
            self.exchange.cancel()
            if self._transport is None:
                self.exchange.refuse(problem_of(EngineError("The server failed to answer this request.")))
            self._finish()

    def release(self) -> None:
        """Forget the requests: they lead back here, and a cycle would wait for a collection, which is rare.

        Events that still come are of no interest, since each choice has its finish reason.
        """
        for choice in self.choices:
            del choice.request

    @property
    def times(self) -> RequestTimes:
        return self.choices[0].request.times

    def usage(self) -> Usage:
        reasoning = sum([c.rich.num_reasoning_tokens for c in self.choices if c.rich is not None])
        return Usage(self._prompt_tokens, sum(c.completion_tokens for c in self.choices), self.cached_tokens, reasoning)


def server_timing(times: RequestTimes) -> str:
    """Return the stages of a finished request in milliseconds, as the header `Server-Timing` has them."""
    return (
        f"read;dur={1e3 * (times.body_read - times.arrival):.2f}, "
        f"preprocess;dur={1e3 * (times.submitted - times.body_read):.2f}, "
        f"queue;dur={1e3 * (times.scheduled - times.submitted):.2f}, "
        f"prefill;dur={1e3 * (times.first_token - times.scheduled):.2f}, "
        f"decode;dur={1e3 * (times.finished - times.first_token):.2f}"
    )


def usage_json(usage: Usage) -> str:
    """Return OpenAI's usage object."""
    details = ""
    if usage.reasoning_tokens:
        details = f',"completion_tokens_details":{{"reasoning_tokens":{usage.reasoning_tokens}}}'
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.completion_tokens},'
        f'"total_tokens":{usage.prompt_tokens + usage.completion_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{usage.cached_tokens}}}{details}}}'
    )
