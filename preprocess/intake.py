"""From the media parts of a request to the items that the engine takes.

    source ──▶ fetch (if remote) ──▶ open: bytes, key, cache, header ──▶ gate: pixels ──▶ decode ──▶ cache ──▶ request

Guarantees:
    - What is on its way for a request alone is given up when the request is over, by a failure, its client or the
      server's end; what somebody else wants too goes on.
    - No thread waits: what has no room, or is being decoded or fetched for somebody else, is a callback.
    - Opening has threads of its own, so that hits and refusals do not queue behind decodes; neither uses the threads
      that text requests need.

Shared fields: `_live` and `_is_closed`, under a lock that is taken twice a request: a gathering is either failed by
`close` or finds it closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from ftserve.engine.errors import FtserveError, InvalidRequestError, RequestCancelledError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.formats import prepare_thread
from ftserve.preprocess.gate import PixelGate
from ftserve.preprocess.gathering import Gathering, Ticket
from ftserve.preprocess.media import Flight, MediaCache, Name, media_key
from ftserve.preprocess.pool import PreprocessPool
from ftserve.preprocess.sources import LocalFiles, MediaSource, Payload, read_data_url

log = logging.getLogger("ftserve.preprocess")

Observe = Callable[[str, float], None]  # (stage, seconds): belongs to one thread
Task = Callable[[Observe], None]

STAGES = ("media_fetch", "media_open", "media_wait", "media_decode")


class Opened(Protocol):
    """A file whose header has been read and found good."""

    @property
    def pixels(self) -> int:
        """What decoding it holds in memory; what has no pixels counts its bytes, three a pixel."""

    def decode(self, key: bytes, is_wanted: Callable[[], bool]) -> MediaItem:
        """Decode; on a thread that has called `prepare_thread`, once. Raises FtserveError.

        What takes long asks `is_wanted` now and then, and ends with RequestCancelledError if not.
        """


class MediaHandler(Protocol):
    """What a family of models makes of media. Shared by all threads; holds no state that changes."""

    max_bytes: int  # of one file
    marks: Mapping[Modality, int]  # the token by which a chat template shows an item, of each kind that is taken

    def options(self, source: MediaSource) -> bytes:
        """Return all that decides what a file becomes, beside its bytes. Raises InvalidRequestError."""

    def open(self, payload: Payload, source: MediaSource) -> Opened:
        """Read the header. Raises FtserveError."""


class Fetcher(Protocol):
    """Gets bytes from the network, see `fetch.HttpFetcher`."""

    def start(self) -> None: ...

    def close(self, timeout_s: float) -> bool: ...

    def num_fetching(self) -> int: ...

    def fetch(
        self, url: str, then: Callable[[Payload], None], failed: Callable[[FtserveError], None]
    ) -> Callable[[], None]:
        """Call `then` or `failed` later, on another thread; return a function that gives up."""


class MediaIntake:
    """Takes the media of requests in, on threads of its own."""

    def __init__(
        self,
        handler: MediaHandler,
        cache: MediaCache,
        gate: PixelGate,
        *,
        files: LocalFiles,
        fetcher: Fetcher | None,
        num_threads: int,
        on_thread: Callable[[str, int], Observe],
    ) -> None:
        """Prepare.

        Args:
            num_threads: how many decode at once; as many more open.
            on_thread: called on each new thread with its role ("open", "decode") and number.
        """
        self._handler = handler
        self.cache = cache
        self.gate = gate
        self._files = files
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._live: set[Gathering] = set()
        self._is_closed = False

        def make_worker(role: str, number: int) -> Callable[[Task], None]:
            observe = on_thread(role, number)
            prepare_thread()
            return lambda task: task(observe)

        self._openers: PreprocessPool[Task] = PreprocessPool(num_threads, partial(make_worker, "open"), _finish)
        self._decoders: PreprocessPool[Task] = PreprocessPool(num_threads, partial(make_worker, "decode"), _drop)

    def start(self) -> None:
        self._openers.start()
        self._decoders.start()
        if self._fetcher is not None:
            self._fetcher.start()

    def wait_loaded(self) -> None:
        self._openers.wait_loaded()
        self._decoders.wait_loaded()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Fail what is on its way and stop; False if a thread has not ended in time."""
        with self._lock:
            self._is_closed = True
            live = [*self._live]
        for gathering in live:
            gathering.fail(_stopping())
        has_ended = self._fetcher is None or self._fetcher.close(timeout_s)
        return self._openers.close(timeout_s) and self._decoders.close(timeout_s) and has_ended

    def put(self, task: Task) -> None:
        """Run something on an opening thread, such as the parsing of a body full of base64."""
        self._openers.put(task)

    def num_fetching(self) -> int:
        return 0 if self._fetcher is None else self._fetcher.num_fetching()

    def depth(self) -> int:
        """Return how many items wait to be opened or decoded, those at the gate aside."""
        return self._openers.depth() + self._decoders.depth()

    def gather(self, sources: Sequence[MediaSource], salt: bytes) -> Gathering:
        """Start on every source, which may be over before this returns."""
        gathering = Gathering(sources, salt)
        with self._lock:
            is_closed = self._is_closed
            self._live.add(gathering)
        gathering.when_over(lambda: self._forget(gathering))
        if is_closed:
            gathering.fail(_stopping())
        for index in range(len(sources)):
            ticket = Ticket(gathering, index)
            try:
                self._begin(ticket)
            except FtserveError as exc:
                ticket.fail(exc)
                break
        return gathering

    def _forget(self, gathering: Gathering) -> None:
        with self._lock:
            self._live.discard(gathering)

    def _begin(self, ticket: Ticket) -> None:
        url = ticket.source.url
        scheme = url[:8].partition(":")[0].lower()
        if not url:
            self._look_up(ticket)
        elif scheme == "data":
            self._openers.put(partial(self._open_data, ticket))
        elif scheme == "file":
            self._openers.put(partial(self._open, ticket, lambda: self._files.read(url, self._handler.max_bytes)))
        elif scheme in ("http", "https") and self._fetcher is not None:
            give_up = self._fetcher.fetch(
                url, lambda payload: self._openers.put(partial(self._open, ticket, lambda: payload)), ticket.fail
            )
            ticket.gathering.when_over(give_up)
        else:
            raise InvalidRequestError("The URL must begin with data:, https:, http: or file:.")

    def _look_up(self, ticket: Ticket) -> None:
        (name,) = _names(ticket)  # a source without a URL has one
        try:
            item = self.cache.claim_named(name, ticket)
        except KeyError:
            raise InvalidRequestError(
                "Nothing is cached under this 'uuid', or not any more; send the data again.", code="unknown_uuid"
            ) from None
        if item is not None:
            ticket.deliver(item)

    def _open_data(self, ticket: Ticket, observe: Observe) -> None:
        """Look for the text of a `data:` URL in the cache, which spares a hit the decoding of its base64."""
        if ticket.is_over:
            return
        began = time.monotonic()
        source, names = ticket.source, _names(ticket)
        try:
            text = source.url.encode()
            digest = media_key((text,), self._handler.options(source), b"")
            name = (ticket.gathering.salt, source.modality, digest)
            item = self.cache.claim_named(name, ticket, names)
        except KeyError:
            read = partial(read_data_url, source.url, self._handler.max_bytes)
            self._open(ticket, read, observe, (*names, name))
            return
        except Exception as exc:  # noqa: BLE001 - `_ours` logs what is not ours
            ticket.fail(_ours(exc))
        else:
            if item is not None:
                ticket.deliver(item)
        observe("media_open", time.monotonic() - began)

    def _open(
        self, ticket: Ticket, read: Callable[[], Payload], observe: Observe, names: Sequence[Name] | None = None
    ) -> None:
        """Get the bytes and look for them in the cache; else read the header and queue for decoding."""
        if ticket.is_over:
            return
        began = time.monotonic()
        try:
            source = ticket.source
            payload = read()
            key = media_key(payload, self._handler.options(source), ticket.gathering.salt)
            found = self.cache.claim(key, ticket, _names(ticket) if names is None else names)
            if isinstance(found, Flight):
                self._admit(found, payload, source)
            elif found is not None:
                ticket.deliver(found)
        except Exception as exc:  # noqa: BLE001 - `_ours` logs what is not ours
            ticket.fail(_ours(exc))
        observe("media_open", time.monotonic() - began)

    def _admit(self, flight: Flight, payload: Payload, source: MediaSource) -> None:
        try:
            opened = self._handler.open(payload, source)
            decode = partial(self._decode, flight, opened, time.monotonic())
            self.gate.enter(opened.pixels, lambda: self._decoders.put(decode))
        except Exception as exc:  # noqa: BLE001 - `_ours` logs what is not ours
            self.cache.lose(flight, _ours(exc))

    def _decode(self, flight: Flight, opened: Opened, since: float, observe: Observe) -> None:
        began = time.monotonic()
        try:
            if not self.cache.is_wanted(flight):
                return
            item = opened.decode(flight.key, lambda: self.cache.has_waiters(flight))
        except Exception as exc:  # noqa: BLE001 - `_ours` logs what is not ours
            self.cache.lose(flight, _ours(exc))
        else:
            self.cache.land(flight, item)
        finally:
            self.gate.leave(opened.pixels)
            observe("media_wait", began - since)
            observe("media_decode", time.monotonic() - began)


def _names(ticket: Ticket) -> tuple[Name, ...]:
    """Return what the client itself calls the item."""
    uuid = ticket.source.uuid
    return () if uuid is None else ((ticket.gathering.salt, ticket.source.modality, uuid),)


def _ours(error: Exception) -> FtserveError:
    """Return an error that may be shown; what is not ours is a bug and is logged."""
    if isinstance(error, FtserveError):
        return error
    log.error("media could not be processed", exc_info=error)
    return FtserveError("The server failed to process an item of media.")


def _stopping() -> FtserveError:
    return RequestCancelledError("The server is stopping.")


def _finish(task: Task) -> None:
    """Run what a closed pool will not: it finds its gathering over, or hands a parsed body to the next pool."""
    task(lambda _stage, _seconds: None)


def _drop(_task: Task) -> None:
    """Forget a decode that a closed pool will not run: `close` has failed whoever waits for it."""
