"""Which image files are read, and what their headers say: the border against hostile bytes.

`PIL.Image.open` is not used: it tries every reader that Pillow has, some of which start programs, and its own limit is
a global that warns. The readers below are called directly, and sizes are checked here.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ftserve.engine.errors import InvalidRequestError, MediaError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

MAX_JPEG_SCANS = 100  # encoders write a dozen at most; each costs a pass over the whole picture

_SIGNATURES = (
    ("JPEG", b"\xff\xd8\xff"),
    ("PNG", b"\x89PNG\r\n\x1a\n"),
    ("GIF", b"GIF87a"),
    ("GIF", b"GIF89a"),
    ("BMP", b"BM"),
    ("TIFF", b"II*\x00"),
    ("TIFF", b"MM\x00*"),
)
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})  # SOF markers of JPEG
_JPEG_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")  # what stands between scans is no stuffing and no restart


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a client may send. Checked against the header, before anything is decoded."""

    max_bytes: int = 64 << 20
    max_pixels: int = 1 << 26  # 8192 x 8192


def prepare_thread() -> None:
    """Import what decoding needs and keep torch to this thread. First on every thread that decodes.

    What it sets is the process's; each thread sets it to the same, before it takes its first job.
    """
    import torch
    from PIL import AvifImagePlugin

    warnings.filterwarnings("ignore", module=r"PIL\.")  # it warns of odd metadata, once for each wording of a client's
    torch.set_num_threads(1)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # its decoder would start one a core; the pool is what uses the cores
    _readers()


def open_image(data: bytes, limits: ImageLimits) -> ImageFile:
    """Read the header of an image and check it. No pixel is decoded; `.size` says what decoding will cost.

    Raises:
        InvalidRequestError: larger than `limits`.
        MediaError: no image that we read.
    """
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(f"An image of {len(data)} bytes; {limits.max_bytes} are allowed.")
    form = _sniff(data)
    if form == "JPEG" and _num_progressive_scans(data) > MAX_JPEG_SCANS:
        raise MediaError("The JPEG image has too many scans.")
    if form == "WEBP":
        _check_size(_webp_size(data), limits)  # Pillow makes room for the whole canvas as it opens one
    try:
        image = _readers()[form](io.BytesIO(data))
    except Exception as exc:  # whatever a decoder makes of bytes that a client chose
        raise MediaError(f"The {form} image cannot be read.") from exc
    _check_size(image.size, limits)
    return image


def _sniff(data: bytes) -> str:
    """Return the format that the first bytes show, whatever the client calls it."""
    for form, start in _SIGNATURES:
        if data.startswith(start):
            return form
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and b"avif" in data[8:32]:
        return "AVIF"
    if not data:
        raise MediaError("The image has no bytes.")
    raise MediaError("This is not an image in a format that is read: JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF.")


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError("The image has no pixels.")
    if width * height > limits.max_pixels:
        raise InvalidRequestError(f"An image of {width}x{height} pixels; {limits.max_pixels} pixels are allowed.")


@cache
def _readers() -> dict[str, type[ImageFile]]:
    from PIL import (
        AvifImagePlugin,
        BmpImagePlugin,
        GifImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    return {
        "JPEG": JpegImagePlugin.JpegImageFile,
        "PNG": PngImagePlugin.PngImageFile,
        "WEBP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "BMP": BmpImagePlugin.BmpImageFile,
        "TIFF": TiffImagePlugin.TiffImageFile,
        "AVIF": AvifImagePlugin.AvifImageFile,
    }


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the canvas that a WebP header announces (RFC 9649, section 2), or (0, 0)."""
    kind = data[12:16]
    try:
        if kind == b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        if kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    except struct.error:
        pass
    return 0, 0


def _num_progressive_scans(data: bytes) -> int:
    """Return how many scans a progressive JPEG has, or 0 for another; counts no further than it needs to."""
    scans, position, is_progressive = 0, 2, False
    while scans <= MAX_JPEG_SCANS and (found := _JPEG_MARKER.search(data, position)):
        marker, position = found[1][0], found.end()
        if marker == 0xD9:  # end of image
            break
        if marker == 0xDA:  # start of a scan
            if not is_progressive:
                return 0
            scans += 1
        is_progressive |= marker in _PROGRESSIVE
        position += int.from_bytes(data[position : position + 2])  # 2 at least if well-formed; else the decoder refuses
    return scans
