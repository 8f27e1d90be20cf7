"""The responses that can be asked for again of any front end, whichever has made them: one database for all.

It is SQLite's, in the server's private folder, and goes with it. SQLite sees to what several processes do at once; each
thread has a connection of its own. A response that is being made is ended by its own front end, which hears of it
through the supervisor.

Shared fields: `_aborts`, under a lock; the thread-local slot of connections.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftserve.server.responses_store import Running

FILE = "responses.sqlite"
_BUSY_TIMEOUT_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS stored (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, body BLOB, messages BLOB, expires REAL, size INTEGER
);
CREATE INDEX IF NOT EXISTS sizes ON stored (number, size);
CREATE INDEX IF NOT EXISTS ages ON stored (expires);
CREATE TABLE IF NOT EXISTS running (id TEXT PRIMARY KEY, body BLOB, slot INTEGER);
"""


def create(folder: Path) -> None:
    """Make the database, before any front end opens it."""
    connection = sqlite3.connect(folder / FILE)
    connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait, and a killed writer spoils nothing
    connection.executescript(_SCHEMA)
    connection.close()


class SharedResponseStore:
    """What `ResponseStore` is to one process, for all front ends of a server. Any thread."""

    def __init__(
        self,
        folder: Path,
        *,
        slot: int,
        abort_elsewhere: Callable[[str], object],
        max_chars: int,
        max_age_s: float,
    ) -> None:
        """Open what `create` made in `folder`, and forget what an earlier front end in this `slot` was making.

        `abort_elsewhere` has the front end that makes a response end it.
        """
        self._path = folder / FILE
        self._slot = slot
        self._abort_elsewhere = abort_elsewhere
        self._max_bytes = max_chars
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._aborts: dict[str, Callable[[], None]] = {}  # of the responses that are being made here
        self._own = threading.local()
        with self._connection() as connection:
            connection.execute("DELETE FROM running WHERE slot = ?", (slot,))

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    def begin(self, response_id: str, running: Running) -> None:
        with self._lock:
            self._aborts[response_id] = running.abort
        with self._connection() as connection:
            row = (response_id, _bytes(running.body), self._slot)
            connection.execute("INSERT INTO running VALUES (?, ?, ?)", row)

    def end(self, response_id: str) -> None:
        """Forget that a response is being made, whatever became of it."""
        with self._lock:
            if self._aborts.pop(response_id, None) is None:
                return
        with self._connection() as connection:
            connection.execute("DELETE FROM running WHERE id = ?", (response_id,))

    def abort(self, response_id: str) -> None:
        """End a response early if it is being made here."""
        with self._lock:
            abort = self._aborts.get(response_id)
        if abort is not None:
            abort()

    def put(self, response_id: str, body: str, messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response that is done."""
        whole, chat = _bytes(body), _bytes(json.dumps(messages, ensure_ascii=False))
        row = (response_id, whole, chat, time.monotonic() + self._max_age_s, len(whole) + len(chat))
        with self._connection() as connection:
            connection.execute("INSERT INTO stored (id, body, messages, expires, size) VALUES (?, ?, ?, ?, ?)", row)
            connection.execute("DELETE FROM stored WHERE expires <= ?", (time.monotonic(),))
            # The oldest go: those with whom, counted from the newest, the sum is too large.
            connection.execute(
                "DELETE FROM stored WHERE number <= (SELECT MAX(number) FROM (SELECT number, "
                "SUM(size) OVER (ORDER BY number DESC) AS sum FROM stored) WHERE sum > ?)",
                (self._max_bytes,),
            )

    def body(self, response_id: str) -> str | None:
        """Return a response, done or not; None if there is none of that id."""
        found = self._stored("body", response_id)
        if found is None and (running := self.running(response_id)) is not None:
            return running.body
        return found

    def messages(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return the chat that ends with a response's answer."""
        text = self._stored("messages", response_id)
        messages: list[dict[str, Any]] | None = None if text is None else json.loads(text)
        return messages

    def delete(self, response_id: str) -> bool:
        with self._connection() as connection:
            return connection.execute("DELETE FROM stored WHERE id = ?", (response_id,)).rowcount > 0

    def running(self, response_id: str) -> Running | None:
        row = self._connection().execute("SELECT body FROM running WHERE id = ?", (response_id,)).fetchone()
        return None if row is None else Running(_text(row[0]), lambda: self._abort_wherever(response_id))

    def num_chars(self) -> int:
        """Return what is kept, in bytes of UTF-8; the first front end tells for all, so that a sum is right."""
        if self._slot:
            return 0
        return int(self._connection().execute("SELECT TOTAL(size) FROM stored").fetchone()[0])

    def _abort_wherever(self, response_id: str) -> None:
        with self._lock:
            is_here = response_id in self._aborts
        if is_here:
            self.abort(response_id)
        else:
            self._abort_elsewhere(response_id)

    def _stored(self, column: str, response_id: str) -> str | None:
        query = f"SELECT {column} FROM stored WHERE id = ? AND expires > ?"  # noqa: S608 - a column of ours
        row = self._connection().execute(query, (response_id, time.monotonic())).fetchone()
        return None if row is None else _text(row[0])

    def _connection(self) -> sqlite3.Connection:
        """Return this thread's connection; as a context it commits."""
        held: _Held | None = getattr(self._own, "held", None)
        if held is None:
            held = self._own.held = _Held(self._path)
        return held.connection


class _Held:
    """A connection that is closed when its thread ends."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        self.connection.execute("PRAGMA synchronous = OFF")  # it need not outlive the machine

    def __del__(self) -> None:
        self.connection.close()


def _bytes(text: str) -> bytes:
    """Return text as it is kept; clients may send surrogates that are no pair."""
    return text.encode("utf-8", "surrogatepass")


def _text(kept: bytes) -> str:
    return kept.decode("utf-8", "surrogatepass")
