"""The output threads: token events in, bytes out.

Guarantees:
    - Events of one request are handled in order, all on one thread.
    - What waits when the thread looks is handled in one go: several tokens of one stream become one chunk, and one
      write.

Shared fields: the inbox, and counters with one writer each (`Feed.num_put`: its engine thread, `_num_done`: this one).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ftserve.engine.inbox import Inbox, make_inbox
from ftserve.engine.threads import name_this_thread
from ftserve.engine.types import RequestTimes, TokenEvent, Usage
from ftserve.server.exchange import Exchange
from ftserve.server.metrics import Recorder

log = logging.getLogger("ftserve.output")


class Answer(Protocol):
    """What an output thread writes: a `Reply`, or an `EmbeddingReply`. It alone touches it after the submit."""

    exchange: Exchange
    error: BaseException | None
    is_done: bool
    flow: Callable[[int], bool] | None  # takes the token of an event that has nothing else; False if it does not

    @property
    def times(self) -> RequestTimes:
        """Return the request's stamps; before `release`."""

    def feed(self, event: TokenEvent) -> bool:
        """Take an event; True if `flush` is to be called after the batch."""

    def flush(self) -> None:
        """Write what the batch brought."""

    def give_up(self) -> None:
        """End after a failure of our own."""

    def usage(self) -> Usage:
        """Return the counts of a reply that is done."""

    def release(self) -> None:
        """Forget the requests."""


_CLOSE: list[TokenEvent] = []  # an empty batch is never put by the engine


class Feed:
    """The way of one engine into an output thread; its `EventSink`."""

    __slots__ = ("_output", "_put", "num_put")

    def __init__(self, output: OutputThread, put: Callable[[list[TokenEvent]], None]) -> None:
        self._output = output
        self._put = put
        self.num_put = 0

    def put(self, batch: list[TokenEvent]) -> None:
        self.num_put += 1
        self._put(batch)

    def lag(self) -> int:
        return self._output.lag()


class OutputThread:
    """One lane: detokenizes, matches stop strings, formats and sends."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.recorder = Recorder()
        self.native_id = 0
        self._inbox: Inbox[list[TokenEvent]] = make_inbox()
        self._feeds: list[Feed] = []  # complete before the first engine starts
        self._num_done = 0
        self._thread = threading.Thread(target=self._run, name=f"ftserve-out-{lane}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def feed(self) -> Feed:
        """Return a new way in, for one engine."""
        feed = Feed(self, self._inbox.put)
        self._feeds.append(feed)
        return feed

    def lag(self) -> int:
        """Return how many batches, of all engines, were put and not yet handled."""
        return sum([feed.num_put for feed in self._feeds]) - self._num_done

    def close(self, timeout_s: float = 5.0) -> bool:
        """Handle what was put, then stop; False if that took longer. After the engine has been closed."""
        self._inbox.put(_CLOSE)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.native_id = name_this_thread(f"ft-out-{self.lane}")
        wait = self._inbox.wait
        while True:
            batches = wait()
            self._handle(batches)
            self._num_done += len(batches)
            if any(batch is _CLOSE for batch in batches):
                return
            del batches  # a parked thread must not keep the last requests alive

    def _handle(self, batches: list[list[TokenEvent]]) -> None:
        began = time.perf_counter()
        dirty: list[Answer] = []
        num_tokens = 0
        is_single = len(batches) == 1  # else tokens of one stream are joined to one chunk
        for batch in batches:
            for event in batch:
                reply: Answer = event.request.route  # type: ignore[assignment]  # what `generation` put there
                token_ids = event.token_ids
                num_tokens += len(token_ids)
                flow = reply.flow if is_single and len(token_ids) == 1 and event.finish_reason is None else None
                try:
                    if flow is not None and flow(token_ids[0]):
                        continue
                    if reply.feed(event):
                        dirty.append(reply)
                except Exception as exc:  # noqa: BLE001 - one broken reply must not take the lane down
                    self._give_up(reply, exc)
        for reply in dirty:
            if not reply.is_done:  # else it was given up after it had been fed
                self._flush(reply)
        self.recorder.observe_output(time.perf_counter() - began, num_tokens)

    def _flush(self, reply: Answer) -> None:
        try:
            reply.flush()
        except Exception as exc:  # noqa: BLE001 - one broken reply must not take the lane down
            self._give_up(reply, exc)
        else:
            if reply.is_done:
                self._finished(reply)

    def _give_up(self, reply: Answer, error: Exception) -> None:
        if not reply.is_done:  # else it has ended, and this event came late
            log.error("request %s could not be written", reply.exchange.request_id, exc_info=error)
            reply.give_up()
            self._finished(reply)

    def _finished(self, reply: Answer) -> None:
        """Record and forget a reply that is done."""
        times = reply.times
        usage = reply.usage()
        self.recorder.observe_request(times, time.monotonic(), usage, failed=reply.error is not None)
        if log.isEnabledFor(logging.INFO):
            log.info(
                "%s %s %s prompt=%d completion=%d ttft=%.1fms total=%.1fms",
                reply.exchange.request_id,
                reply.exchange.path,
                "failed" if reply.error is not None else "done",
                usage.prompt_tokens,
                usage.completion_tokens,
                1e3 * max(0.0, times.first_token - times.arrival),
                1e3 * (time.monotonic() - times.arrival),
            )
        reply.release()
