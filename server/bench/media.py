"""Images and clips for load: real files that all differ, made once and told apart by a few bytes that decoders skip.

Encoding a file for each request would cost the generator more than decoding costs the server.
"""

from __future__ import annotations

import base64
import io
import random
import struct
from collections.abc import Callable

_SKIPPED = 42  # bytes: the skipped part and what precedes it are then divisible by 3, as base64 wants


def jpeg_maker(width: int, height: int, seed: int) -> Callable[[int], str]:
    """Return a function from a number to a data URL; different numbers are different files with the same picture."""
    data = _jpeg(width, height, seed)
    rest = base64.b64encode(data[2:]).decode()

    def make(number: int) -> str:
        comment = b"\xff\xfe" + struct.pack(">HQ", _SKIPPED - 4, number) + bytes(_SKIPPED - 14)
        head = base64.b64encode(b"\xff\xd8" + comment).decode()
        return f"data:image/jpeg;base64,{head}{rest}"

    return make


def _jpeg(width: int, height: int, seed: int) -> bytes:
    """Return a picture whose file is as large as a photograph's: soft shapes under fine noise."""
    from PIL import Image

    rng = random.Random(seed)
    coarse = Image.frombytes("RGB", (16, 12), rng.randbytes(16 * 12 * 3)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    grain = Image.frombytes("L", (width, height), rng.randbytes(width * height)).convert("RGB")
    picture = io.BytesIO()
    Image.blend(coarse, grain, 0.06).save(picture, "JPEG", quality=88)
    return picture.getvalue()


def clip_maker(width: int, height: int, seconds: float, seed: int) -> Callable[[int], str]:
    """Return a function from a number to a data URL of an H.264 clip; needs PyAV."""
    data = _clip(width, height, seconds, seed)
    padding = -(len(data) + 8) % 3
    data += struct.pack(">I4s", 8 + padding, b"free") + bytes(padding)
    body = base64.b64encode(data).decode()

    def make(number: int) -> str:
        return f"data:video/mp4;base64,{body}{base64.b64encode(_free_box(number)).decode()}"

    return make


def _free_box(number: int) -> bytes:
    """Return a box that readers of MP4 skip."""
    return struct.pack(">I4sQ", 18, b"free", number) + b"\x00\x00"


def _clip(width: int, height: int, seconds: float, seed: int, fps: int = 24) -> bytes:
    import av
    import numpy as np
    from PIL import Image

    rng = random.Random(seed)
    wide = Image.frombytes("RGB", (24, 9), rng.randbytes(24 * 9 * 3)).resize((2 * width, height))
    pixels = np.asarray(wide)
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        count = int(seconds * fps)
        for k in range(count):
            left = k * width // count
            frame = av.VideoFrame.from_ndarray(pixels[:, left : left + width], format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return target.getvalue()
