"""What the engine's process and a front end's say to each other, as bytes.

A handle names a request: the number of the front end's link is in its upper half, so nobody knows what comes late for
a front end that has gone.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ftserve.engine import errors
from ftserve.engine.codec import Coder, Reader, Writer, coder_of, fields_coder, read_bytes, write_bytes
from ftserve.engine.errors import EngineRequestError, FtserveError
from ftserve.engine.grammar import Grammar
from ftserve.engine.histogram import Histogram
from ftserve.engine.loop import EngineStats
from ftserve.engine.types import GenerationRequest, RequestTimes, TokenEvent

HELLO, SUBMIT, CANCEL = b"H", b"S", b"C"  # from a front end
EVENTS, STATUS = b"E", b"T"  # from the engine
LOST, FAILED, CLOSED = b"L", b"F", b"X"  # from a front end to itself
LINK_BITS = 32

NOT_CARRIED = "route lane replica"  # of a request: each side has its own

_IN_FULL = -1  # in the place of a token: the event is more than one token, and comes with those behind the rows
_ROW = "q"

_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, FtserveError)
}


class Hello(NamedTuple):
    """A front end's first message to an engine."""

    slot: int  # which of the front ends it is, and so its lane in the engine
    endpoint: str  # where it wants its events


class Status(NamedTuple):
    """How the engine is, every now and then."""

    engine: int  # which in the row of engine processes
    stats: EngineStats
    bounds: tuple[float, ...]  # these three: the histogram of the steps
    counts: tuple[int, ...]
    seconds: float
    description: tuple[tuple[str, str], ...]
    death: str | None  # its message, if the engine has died

    def step_seconds(self) -> Histogram:
        histogram = Histogram(self.bounds)
        histogram.counts, histogram.total = list(self.counts), self.seconds
        return histogram


def pack(coder: Coder, value: object) -> bytes:
    """Return a value without arrays as bytes."""
    out = Writer()
    coder.write(out, value)
    return bytes(out)


def request_coder(compile_grammar: Callable[[str], Grammar] | None = None) -> Coder:
    """Return the coder that reads requests as dicts of their fields, but for `NOT_CARRIED`.

    A grammar crosses as its source, which the reader compiles again; who only writes needs no `compile_grammar`.
    """

    def write_grammar(out: Writer, grammar: Grammar) -> None:
        write_bytes(out, grammar.source.encode())

    def read_grammar(reader: Reader) -> Grammar:
        assert compile_grammar is not None, "made for writing only"
        return compile_grammar(read_bytes(reader).decode())

    special: dict[type, Coder] = {Grammar: Coder(write_grammar, read_grammar)}
    return fields_coder(GenerationRequest, special, without=NOT_CARRIED)


def _write_error(out: Writer, error: Exception) -> None:
    """Write the class and the fields of an error of ours; what another one says is not for clients."""
    if not isinstance(error, FtserveError):
        error = EngineRequestError("The engine could not finish this request.")
    write_bytes(out, json.dumps([type(error).__name__, vars(error)]).encode())


def _read_error(reader: Reader) -> Exception:
    name, fields = json.loads(read_bytes(reader))
    kind = _ERRORS[name]
    error = kind.__new__(kind, fields["message"])
    vars(error).update(fields)
    return error


HELLO_CODER = coder_of(Hello, {})
STATUS_CODER = coder_of(Status, {})
_EVENT_CODER = fields_coder(
    TokenEvent,
    {Exception: Coder(_write_error, _read_error)},
    without="request",
)
_TIMES_CODER = coder_of(RequestTimes, {})


def _is_one_token(event: TokenEvent) -> bool:
    return (
        event.finish_reason is None
        and len(event.token_ids) == 1
        and event.logprobs is None
        and not event.num_cached_tokens
        and event.prompt_logprobs is None
        and event.stop_token_id is None
        and event.error is None
        and event.embedding is None
    )


def pack_events(batch: Sequence[TokenEvent]) -> bytes:
    """Return one step's events: (handle, token) a row, then those events that are more than a token.

    The route of each request is its handle. The last event of a request has its times.
    """
    rows, rest = array(_ROW), Writer()
    for event in batch:
        rows.append(event.request.route)  # type: ignore[arg-type]  # a handle
        if _is_one_token(event):
            rows.append(event.token_ids[0])
        else:
            rows.append(_IN_FULL)
            _EVENT_CODER.write(rest, event)
            if event.finish_reason is not None:
                _TIMES_CODER.write(rest, event.request.times)
    return b"".join((EVENTS, len(batch).to_bytes(4, "little"), rows.tobytes(), rest))


def unpack_events(data: memoryview, known: Mapping[int, GenerationRequest]) -> list[tuple[int, TokenEvent]]:
    """Return the events of `pack_events` with their handles, but for those that are nobody's."""
    end = 4 + 16 * int.from_bytes(data[:4], "little")
    rows = array(_ROW)
    rows.frombytes(data[4:end])
    reader = Reader(data[end:])
    events = []
    pairs = iter(rows)
    for handle, token_id in zip(pairs, pairs, strict=True):
        request = known.get(handle)
        if token_id != _IN_FULL:
            if request is not None:
                events.append((handle, TokenEvent(request, (token_id,))))
            continue
        fields = _EVENT_CODER.read(reader)
        times = _TIMES_CODER.read(reader) if "finish_reason" in fields else None
        if request is not None:
            if times is not None:
                _take_stamps(request.times, times)
            events.append((handle, TokenEvent(request, **fields)))
    return events


def _take_stamps(ours: RequestTimes, theirs: RequestTimes) -> None:
    """Copy what the engine has stamped; choices of one request share their times, and the latest counts."""
    for name in RequestTimes.__dataclass_fields__:
        stamp = getattr(theirs, name)
        if stamp > getattr(ours, name):
            setattr(ours, name, stamp)


def unpack(coder: Coder, data: memoryview) -> Any:
    """Return the value that `pack` was given."""
    return coder.read(Reader(data))
