"""The responses that can be asked for again: those that are being made, and the latest that are done.

Shared fields: both dictionaries and the count of characters, under one lock that is held for look-ups; taken three
times a response, never per token.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Stored(NamedTuple):
    """A response that is done."""

    body: str  # as it was answered
    messages: str  # JSON: the chat so far, its answer included
    expires: float  # time.monotonic() seconds


class Running(NamedTuple):
    """A response that is being made."""

    body: str  # as it was when it began
    abort: Callable[[], None]  # end it early; its client is told


class ResponseStore:
    """Bounded in characters, of JSON that is mostly ASCII, and in age; the oldest go first. Any thread."""

    def __init__(self, *, max_chars: int, max_age_s: float) -> None:
        self._max_chars = max_chars
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._num_chars = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_chars > 0

    def begin(self, response_id: str, running: Running) -> None:
        with self._lock:
            self._running[response_id] = running

    def end(self, response_id: str) -> None:
        """Forget that a response is being made, whatever became of it."""
        with self._lock:
            self._running.pop(response_id, None)

    def put(self, response_id: str, body: str, messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response that is done."""
        now = time.monotonic()
        text = json.dumps(messages, ensure_ascii=False)
        with self._lock:
            self._stored[response_id] = Stored(body, text, now + self._max_age_s)
            self._num_chars += len(body) + len(text)
            self._drop_old(now)

    def body(self, response_id: str) -> str | None:
        """Return a response, done or not; None if there is none of that id."""
        with self._lock:
            self._drop_old(time.monotonic())
            found = self._stored.get(response_id) or self._running.get(response_id)
            return found.body if found is not None else None

    def messages(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return the chat that ends with a response's answer."""
        with self._lock:
            self._drop_old(time.monotonic())
            found = self._stored.get(response_id)
        if found is None:
            return None
        messages: list[dict[str, Any]] = json.loads(found.messages)
        return messages

    def delete(self, response_id: str) -> bool:
        with self._lock:
            return self._pop(response_id)

    def running(self, response_id: str) -> Running | None:
        with self._lock:
            return self._running.get(response_id)

    def num_chars(self) -> int:
        """Return what is kept."""
        with self._lock:
            return self._num_chars

    def _drop_old(self, now: float) -> None:
        while self._stored:
            oldest, stored = next(iter(self._stored.items()))
            if stored.expires > now and self._num_chars <= self._max_chars:
                return
            self._pop(oldest)

    def _pop(self, response_id: str) -> bool:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_chars -= len(stored.body) + len(stored.messages)
        return stored is not None
