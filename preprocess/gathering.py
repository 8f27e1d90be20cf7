"""The media of one request on their way to it, from several threads, while its client may go away at any time.

Guarantees: a gathering is over exactly once: when its items are there, or one of them has failed, or it was cancelled.
Whoever registered with `when_over` is called once then, by the thread that ended it.

Shared fields: those of a gathering, under a lock of its own that is taken once an item.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError, OverloadedError, RequestCancelledError
from ftserve.engine.types import MediaItem
from ftserve.preprocess.sources import MediaSource


class Gathering:
    """The items of one request on their way to it."""

    def __init__(self, sources: Sequence[MediaSource], salt: bytes) -> None:
        self.sources = sources
        self.salt = salt
        self.is_over = False  # nothing more is wanted: all is there, or it has failed
        self._items: list[MediaItem | None] = [None] * len(sources)
        self._num_missing = len(sources)
        self._error: FtserveError | None = None
        self._lock = threading.Lock()
        self._on_over: list[Callable[[], None]] = []

    def found(self) -> tuple[MediaItem, ...]:
        """Return the items in the order of the sources, once it is over.

        Raises:
            FtserveError: why there are none.
        """
        if self._error is not None:
            raise _named(self._error, None)  # anew: its traceback would lead back here
        return tuple(item for item in self._items if item is not None)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once it is over: at once if so already, else by the thread that ends it."""
        with self._lock:
            if not self.is_over:
                self._on_over.append(callback)
                return
        callback()

    def cancel(self) -> None:
        """Give up, because the client has gone. Any thread, any time."""
        self.fail(RequestCancelledError("The client has gone."))

    def settle(self, index: int, item: MediaItem) -> None:
        with self._lock:
            if self.is_over:
                return
            self._items[index] = item
            self._num_missing -= 1
            if self._num_missing:
                return
            callbacks = self._end()
        for callback in callbacks:
            callback()

    def fail(self, error: FtserveError) -> None:
        with self._lock:
            if self.is_over:
                return
            self._error = error
            callbacks = self._end()
        for callback in callbacks:
            callback()

    def _end(self) -> list[Callable[[], None]]:
        self.is_over = True
        callbacks, self._on_over = self._on_over, []
        return callbacks


class Ticket:
    """One item of a gathering: what waits at the cache."""

    __slots__ = ("gathering", "index")

    def __init__(self, gathering: Gathering, index: int) -> None:
        self.gathering = gathering
        self.index = index

    @property
    def source(self) -> MediaSource:
        return self.gathering.sources[self.index]

    @property
    def is_over(self) -> bool:
        return self.gathering.is_over

    def deliver(self, item: MediaItem) -> None:
        self.gathering.settle(self.index, item)

    def fail(self, error: FtserveError) -> None:
        self.gathering.fail(_named(error, self.source.param))


def _named(error: FtserveError, param: str | None) -> FtserveError:
    """Return `error` anew, since others may have got the same one, with the part that it is about."""
    match error:
        case MediaError():
            return MediaError(error.message, param=error.param or param)
        case InvalidRequestError():
            return InvalidRequestError(error.message, param=error.param or param, code=error.code)
        case OverloadedError():
            return OverloadedError(error.message, retry_after_s=error.retry_after_s)
    return type(error)(error.message)
