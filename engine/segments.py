"""Patches of images by shared memory, from a front end's process to the engine's.

Ownership: the front end writes a segment, a file in its own folder, and gives it away with the message that names it.
The engine maps it and takes its name away at once; the memory is free when the last array on it is. What was never
fetched, since either side died, goes with the front end's folder, which the supervisor removes, or with `clear`, when
another engine takes over. Where the memory is full, or small patches are not worth it, they go inside the message.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftserve.engine.codec import Reader, Writer, read_bytes, read_size, write_bytes, write_size

MIN_SEGMENT_BYTES = 64 << 10

_Patches = NDArray[np.uint8]


class SegmentWriter:
    """Puts arrays of one front end where the engine finds them. Any thread, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def write(self, out: Writer, arrays: Sequence[_Patches]) -> None:
        """Write to `out` where the engine finds `arrays`."""
        write_size(out, len(arrays))
        for patches in arrays:
            name = self._share(patches) if patches.nbytes >= MIN_SEGMENT_BYTES else ""
            write_bytes(out, name.encode())
            if not name:
                write_bytes(out, patches.tobytes())

    def clear(self) -> None:
        """Remove what an engine that has died did not fetch."""
        for path in self._folder.glob("patches-*"):
            path.unlink(missing_ok=True)

    def _share(self, patches: _Patches) -> str:
        """Copy an array into a new segment and return its name; none if there is no room."""
        path = self._folder / f"patches-{next(self._numbers)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, patches.nbytes)  # else writing to full memory would be a SIGBUS
            with mmap.mmap(descriptor, patches.nbytes) as memory:
                np.frombuffer(memory, np.uint8)[:] = patches.reshape(-1)
        except OSError:
            path.unlink()
            return ""
        finally:
            os.close(descriptor)
        return str(path)


def read_arrays(reader: Reader) -> list[_Patches]:
    """Return what `SegmentWriter.write` wrote, flat, and free the segments' names.

    Raises:
        OSError: a segment is gone, and so is its front end.
    """
    return [_map(name) if (name := read_bytes(reader)) else _inline(reader) for _ in range(read_size(reader))]


def _inline(reader: Reader) -> _Patches:
    return np.frombuffer(read_bytes(reader), np.uint8)


def _map(name: bytes) -> Any:
    descriptor = os.open(name, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        os.unlink(name)  # noqa: PTH108 - bytes
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8)
