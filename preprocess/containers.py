"""Files of PyAV's that hold video or sound: one reader by what the file is, and nothing that opens further files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from av.container import InputContainer

Signature = tuple[int, bytes, str]  # (offset, bytes, the reader's name)

MOVIES: tuple[Signature, ...] = (  # what may hold sound beside pictures
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (4, b"free", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (0, b"OggS", "ogg"),
)


def sniff(data: bytes, signatures: Sequence[Signature]) -> str | None:
    """Return the reader for what the first bytes show, whatever the client calls it."""
    return next((name for at, mark, name in signatures if data[at : at + len(mark)] == mark), None)


def open_container(data: bytes, reader: str, options: Mapping[str, str]) -> InputContainer:
    """Open a file in memory. Raises what PyAV makes of bytes that a client chose."""
    import av

    return av.open(
        io.BytesIO(data),
        "r",
        format=reader,
        options={"protocol_whitelist": "pipe", **options},
        metadata_errors="ignore",
        io_open=_refuse,
    )


def _refuse(*_: object) -> NoReturn:
    """Keep a file from having others opened."""
    raise PermissionError
