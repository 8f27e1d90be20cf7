"""Annotated classes as bytes, for the border between two processes of ours.

A coder is made from the annotations of a dataclass or named tuple when its module is imported: a field that is added
later crosses like the others, and one of a kind that cannot cross is an error at import. Decoding makes values of the
annotated types and nothing else; no name in the bytes is ever looked up.

Byte order and sizes are the machine's own: the bytes never leave it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import struct
import types
import typing
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Writer(bytearray):
    """Bytes that grow, and the arrays beside them, which whoever sends may pass on in another way."""

    __slots__ = ("arrays", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[NDArray[np.uint8]] = []
        self.seen: dict[int, tuple[int, object]] = {}  # by id, kept alive: objects that count by identity


class Reader:
    """A place in received bytes."""

    __slots__ = ("arrays", "at", "data", "seen")

    def __init__(self, data: memoryview, arrays: collections.abc.Sequence[NDArray[np.uint8]] = ()) -> None:
        self.data = data
        self.at = 0
        self.arrays = arrays
        self.seen: list[Any] = []

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes.

        Raises:
            ValueError: there are not so many.
        """
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise ValueError("a message ends too early")
        return self.data[start : self.at]


class Coder(NamedTuple):
    """How values of one type are written and read."""

    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]


_SIZE = struct.Struct("=I")
_FLOAT = struct.Struct("=d")
# Of arrays that cross.
DTYPES = [np.dtype(kind) for kind in (np.uint8, np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64)]
_INT = "q"  # of an `array`
_INT_BYTES = array(_INT).itemsize


def write_bytes(out: Writer, value: bytes | bytearray | memoryview) -> None:
    out += _SIZE.pack(len(value))
    out += value


def read_bytes(reader: Reader) -> bytes:
    return bytes(reader.take(read_size(reader)))


def write_size(out: Writer, value: int) -> None:
    out += _SIZE.pack(value)


def read_size(reader: Reader) -> int:
    size: int = _SIZE.unpack(reader.take(_SIZE.size))[0]
    return size


def _write_int(out: Writer, value: int) -> None:
    """Write an integer of any size: a client's seed may be one."""
    length = value.bit_length() // 8 + 1
    out.append(length) if length < 256 else _too_large(value)
    out += value.to_bytes(length, "little", signed=True)


def _too_large(value: int) -> None:
    raise OverflowError(f"an integer of {value.bit_length()} bits")


def _read_int(reader: Reader) -> int:
    return int.from_bytes(reader.take(reader.take(1)[0]), "little", signed=True)


# Surrogates come from JSON's escapes, which may be unpaired.
_PLAIN: dict[object, Coder] = {
    int: Coder(_write_int, _read_int),
    bool: Coder(lambda out, value: out.append(value), lambda reader: reader.take(1)[0] != 0),
    float: Coder(
        lambda out, value: out.extend(_FLOAT.pack(value)), lambda reader: _FLOAT.unpack(reader.take(_FLOAT.size))[0]
    ),
    bytes: Coder(write_bytes, read_bytes),
    str: Coder(
        lambda out, value: write_bytes(out, value.encode("utf-8", "surrogatepass")),
        lambda reader: read_bytes(reader).decode("utf-8", "surrogatepass"),
    ),
}


def coder_of(kind: Any, special: Mapping[type, Coder]) -> Coder:
    """Return the coder of an annotation; `special` has those of types that are written in a way of their own.

    Raises:
        TypeError: values of this type cannot cross.
    """
    if kind in special:
        return special[kind]
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        return _optional(coder_of(next(one for one in arguments if one is not type(None)), special))
    if origin is tuple and arguments[-1] is not ...:
        return _fixed([coder_of(one, special) for one in arguments])
    if origin in (tuple, frozenset, collections.abc.Sequence):
        make = tuple if origin is collections.abc.Sequence else origin
        return _ints(make) if arguments[0] is int else _many(coder_of(arguments[0], special), make)
    if origin is np.ndarray:
        return Coder(_write_array, _read_array)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of(list(kind))
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple)):
        return _whole(kind, special)
    raise TypeError(f"{kind} cannot cross between processes")


def fields_coder(kind: type, special: Mapping[type, Coder], *, without: str = "") -> Coder:
    """Return a coder that writes an object's fields, but for those named in `without`, and reads a dict of them.

    Fields that have their default are left out.
    """
    imported = {"NDArray": NDArray, "np": np, **{one.__name__: one for one in special}}  # else for type checkers only
    hints = typing.get_type_hints(kind, localns=imported)
    defaults = _defaults(kind)
    left_out = without.split()
    assert set(left_out) <= defaults.keys(), f"{kind.__name__} has no such fields"
    fields = [
        (1 << bit, name, defaults[name], coder_of(hints[name], special))
        for bit, name in enumerate(name for name in defaults if name not in left_out)
    ]
    assert len(fields) <= 64, "more fields than bits in their mask"

    def write(out: Writer, value: Any) -> None:
        mask, start = 0, len(out)
        out += bytes(8)
        for bit, name, default, coder in fields:
            field = getattr(value, name)
            if field is not default and (type(field) is not type(default) or field != default):
                mask |= bit
                coder.write(out, field)
        out[start : start + 8] = mask.to_bytes(8, "little")

    def read(reader: Reader) -> dict[str, Any]:
        mask = int.from_bytes(reader.take(8), "little")
        return {name: coder.read(reader) for bit, name, _, coder in fields if mask & bit}

    return Coder(write, read)


def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of all fields; for those without one, an object that nothing is equal to."""
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return {f.name: object() if f.default is missing else f.default for f in dataclasses.fields(kind)}
    defaults: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    return {name: defaults.get(name, object()) for name in kind._fields}  # type: ignore[attr-defined]


def _whole(kind: type, special: Mapping[type, Coder]) -> Coder:
    write, read_fields = fields_coder(kind, special)
    if dataclasses.is_dataclass(kind) and kind.__eq__ is object.__eq__:
        return _shared(kind, Coder(write, read_fields))
    return Coder(write, lambda reader: kind(**read_fields(reader)))


def _shared(kind: type, fields: Coder) -> Coder:
    """Return the coder of a class whose objects count by identity: what is one object here is one there."""

    def write(out: Writer, value: Any) -> None:
        known = out.seen.get(id(value))
        out.append(known is None)
        if known is not None:
            write_size(out, known[0])
        else:
            fields.write(out, value)
            out.seen[id(value)] = (len(out.seen), value)

    def read(reader: Reader) -> Any:
        if not reader.take(1)[0]:
            return reader.seen[read_size(reader)]
        value = kind(**fields.read(reader))
        reader.seen.append(value)
        return value

    return Coder(write, read)


def _optional(inner: Coder) -> Coder:
    def write(out: Writer, value: Any) -> None:
        out.append(value is not None)
        if value is not None:
            inner.write(out, value)

    return Coder(write, lambda reader: inner.read(reader) if reader.take(1)[0] else None)


def _fixed(parts: list[Coder]) -> Coder:
    def write(out: Writer, value: Any) -> None:
        for part, one in zip(parts, value, strict=True):
            part.write(out, one)

    return Coder(write, lambda reader: tuple([part.read(reader) for part in parts]))


def _many(inner: Coder, make: Callable[[list[Any]], Any]) -> Coder:
    def write(out: Writer, value: Any) -> None:
        write_size(out, len(value))
        for one in value:
            inner.write(out, one)

    return Coder(write, lambda reader: make([inner.read(reader) for _ in range(read_size(reader))]))


def _ints(make: Callable[[Any], Any]) -> Coder:
    def write(out: Writer, value: Any) -> None:
        write_size(out, len(value))
        out += array(_INT, value).tobytes()

    def read(reader: Reader) -> Any:
        ids = array(_INT)
        ids.frombytes(reader.take(read_size(reader) * _INT_BYTES))
        return make(ids)

    return Coder(write, read)


def _one_of(members: list[enum.Enum]) -> Coder:
    return Coder(lambda out, value: out.append(members.index(value)), lambda reader: members[reader.take(1)[0]])


def _write_array(out: Writer, value: NDArray[Any]) -> None:
    out.append(DTYPES.index(value.dtype))
    write_size(out, len(out.arrays))
    _SHAPE.write(out, value.shape)
    out.arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _read_array(reader: Reader) -> NDArray[Any]:
    dtype = DTYPES[reader.take(1)[0]]
    flat = reader.arrays[read_size(reader)]
    return flat.view(dtype).reshape(_SHAPE.read(reader))


_SHAPE = _ints(tuple)
