"""What crosses between processes arrives whole, and a field that somebody adds crosses too or fails here."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ftserve.engine import errors, messages
from ftserve.engine.codec import Coder, Reader, Writer, coder_of, fields_coder
from ftserve.engine.errors import EngineRequestError, FtserveError, InvalidRequestError, OverloadedError
from ftserve.engine.grammar import Grammar
from ftserve.engine.segments import MIN_SEGMENT_BYTES, SegmentWriter, read_arrays
from ftserve.engine.types import (
    FinishReason,
    GenerationRequest,
    MediaItem,
    MediaSpan,
    Modality,
    RequestTimes,
    SamplingParams,
    TokenEvent,
)

GRAMMAR = Grammar("start: /a*/", 100, object())
NAMES = {"np": np, "NDArray": NDArray, "Grammar": Grammar}


def some(kind: Any) -> Any:
    """Return a value of an annotated type that is nobody's default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return some(arguments[0])
    if origin is tuple and arguments[-1] is not ...:
        return tuple(some(one) for one in arguments)
    if origin in (tuple, frozenset, collections.abc.Sequence):
        return (frozenset if origin is frozenset else tuple)([5 if arguments[0] is int else some(arguments[0])])
    if origin is np.ndarray:
        return np.arange(12, dtype=np.uint8).reshape(3, 4)
    if kind in (int, float, str, bytes, bool):
        return {int: 2**63 + 17, float: 0.375, str: "é\ud800", bytes: b"\0\xff", bool: True}[kind]
    if kind is Grammar:
        return GRAMMAR
    if kind is Exception:
        return OverloadedError("Full.", retry_after_s=7)
    if issubclass(kind, enum.Enum):
        return list(kind)[-1]
    return kind(**{name: some(hint) for name, hint in hints(kind).items()})


def some_event(name: str, kind: Any, request: GenerationRequest) -> TokenEvent:
    fields: dict[str, Any] = {"token_ids": (5,), name: (5, 7) if name == "token_ids" else small(some(kind))}
    return TokenEvent(request, **fields)


def small(value: Any) -> Any:
    """Return a token's or a count's value: those are below 2**63."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 3
    if isinstance(value, tuple):
        made = [small(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, localns=NAMES)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (tuple, array)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, FtserveError):
        return type(a) is type(b) and str(a) == str(b) and vars(a) == vars(b)
    return bool(a == b)


def a_request(**fields: Any) -> GenerationRequest:
    required = {"request_id": "r", "index": 0, "prompt_ids": (1, 2), "sampling": SamplingParams(max_tokens=1)}
    return GenerationRequest(**{**required, "lane": 0, "route": 0, **fields})


def cross(request: GenerationRequest) -> dict[str, Any]:
    out = Writer()
    messages.request_coder().write(out, request)
    return messages.request_coder(lambda _source: GRAMMAR).read(Reader(memoryview(out), out.arrays))  # type: ignore[no-any-return]


CARRIED = sorted(hints(GenerationRequest).keys() - set(messages.NOT_CARRIED.split()))


@pytest.mark.parametrize("name", CARRIED)
def test_a_field_of_a_request_arrives(name: str) -> None:
    kind = hints(GenerationRequest)[name]
    value = SamplingParams(max_tokens=9, seed=2**64 - 1) if kind is SamplingParams else some(kind)
    value = (1, 2**40) if name == "prompt_ids" else value
    assert same(cross(a_request(**{name: value}))[name], value)


@pytest.mark.parametrize("name", hints(SamplingParams))
def test_a_sampling_parameter_arrives(name: str) -> None:
    kind = hints(SamplingParams)[name]
    value = some(kind) if name in ("seed", "stop", "grammar") else small(some(kind))
    if isinstance(value, frozenset):
        value = frozenset({3})
    sampling = SamplingParams(**{"max_tokens": 1, name: value})
    assert same(cross(a_request(sampling=sampling))["sampling"], sampling)


def test_defaults_take_no_room_and_are_defaults_again() -> None:
    fields = cross(a_request())
    assert "media" not in fields
    assert GenerationRequest(lane=0, route=0, **fields).sampling == SamplingParams(max_tokens=1)


def test_spans_of_one_item_share_it_on_the_other_side() -> None:
    item = MediaItem(
        modality=Modality.VIDEO, patches=np.zeros((4, 2), np.uint8), grid=(2, 1, 2), num_tokens=2, digest=b"d"
    )
    one, two = cross(a_request(media=(MediaSpan(item, 0, 0), MediaSpan(item, 9, 1))))["media"]
    assert one.item is two.item
    assert (one.offset, two.offset, two.step) == (0, 9, 1)


@pytest.mark.parametrize("name", [name for name in hints(TokenEvent) if name != "request"])
def test_a_field_of_an_event_arrives(name: str) -> None:
    request = a_request(route=8)
    event = some_event(name, hints(TokenEvent)[name], request)
    plain = TokenEvent(request, (9,))
    packed = memoryview(messages.pack_events([plain, event, plain]))[1:]
    (handle, first), (_, second), (_, third) = messages.unpack_events(packed, {8: request})
    assert (handle, first.token_ids, third.token_ids) == (8, (9,), (9,))
    assert first.request is second.request is request
    for field in dataclasses.fields(TokenEvent):
        assert same(getattr(second, field.name), getattr(event, field.name)), field.name


def test_events_of_requests_that_nobody_knows_are_left_out() -> None:
    known, unknown = a_request(route=1), a_request(route=2)
    batch = [TokenEvent(unknown, (1,), FinishReason.STOP), TokenEvent(unknown, (1,)), TokenEvent(known, (2,))]
    ((handle, event),) = messages.unpack_events(memoryview(messages.pack_events(batch))[1:], {1: known})
    assert (handle, event.token_ids) == (1, (2,))


def test_the_last_event_brings_the_engines_stamps() -> None:
    ours, theirs = a_request(times=RequestTimes(arrival=1.0)), a_request(times=RequestTimes(arrival=1.0, finished=9.0))
    message = messages.pack_events([TokenEvent(theirs, (), FinishReason.LENGTH)])
    messages.unpack_events(memoryview(message)[1:], {0: ours})
    assert ours.times == RequestTimes(arrival=1.0, finished=9.0)


@pytest.mark.parametrize("error", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_an_error_of_ours_crosses_as_itself(error: type) -> None:
    if not issubclass(error, FtserveError):
        pytest.skip("imported")
    fields: dict[str, Any] = {"retry_after_s": 3} if error is OverloadedError else {}
    if issubclass(error, InvalidRequestError):
        fields = {"param": "stop"}
    made = error("No, é.", **fields)
    event = TokenEvent(a_request(), (), FinishReason.ERROR, error=made)
    ((_, there),) = messages.unpack_events(memoryview(messages.pack_events([event]))[1:], {0: event.request})
    assert same(made, there.error)


def test_what_others_say_does_not_cross() -> None:
    event = TokenEvent(a_request(), (), FinishReason.ERROR, error=OSError("/dev/secret"))
    ((_, there),) = messages.unpack_events(memoryview(messages.pack_events([event]))[1:], {0: event.request})
    assert isinstance(there.error, EngineRequestError)
    assert "secret" not in str(there.error)


def test_a_type_that_cannot_cross_is_an_error_when_its_coder_is_made() -> None:
    @dataclasses.dataclass
    class Odd:
        field: dict[str, int]

    with pytest.raises(TypeError, match="cannot cross"):
        fields_coder(Odd, {})


def test_a_message_that_ends_too_early_is_an_error() -> None:
    out = Writer()
    coder: Coder = coder_of(str, {})
    coder.write(out, "hello")
    with pytest.raises(ValueError, match="too early"):
        coder.read(Reader(memoryview(out)[:-1]))


@pytest.mark.parametrize("size", [1, MIN_SEGMENT_BYTES, 3 * MIN_SEGMENT_BYTES])
def test_patches_arrive_and_leave_no_file(tmp_path: Path, size: int) -> None:
    patches = np.random.default_rng(0).integers(0, 256, (size, 2), dtype=np.uint8)
    out = Writer()
    SegmentWriter(tmp_path).write(out, [patches, patches])
    assert len(list(tmp_path.iterdir())) == (2 if patches.nbytes >= MIN_SEGMENT_BYTES else 0)
    for there in read_arrays(Reader(memoryview(out))):
        assert np.array_equal(there.reshape(patches.shape), patches)
    assert list(tmp_path.iterdir()) == []


def test_what_an_engine_did_not_fetch_is_removed_for_the_next(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.write(Writer(), [np.zeros(MIN_SEGMENT_BYTES, np.uint8)])
    writer.clear()
    assert list(tmp_path.iterdir()) == []
