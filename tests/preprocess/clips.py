"""Video files for the tests, made with PyAV; frame k of a numbered clip has 5 * k in its green channel."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def numbered(number: int, width: int = 64, height: int = 48) -> U8:
    frame = np.zeros((height, width, 3), np.uint8)
    frame[..., 1] = 5 * number
    return frame


def number_of(frame: U8) -> int:
    """Return which frame this is, however it was resized; `[..., channels]`."""
    return round(float(frame[..., 1].mean()) / 5)


def clip(
    num_frames: int = 50,
    *,
    codec: str = "libx264",
    form: str = "mp4",
    rate: int = 10,
    keyframes: int = 250,
    picture: Callable[[int], U8] = numbered,
    ticks: Sequence[int] | None = None,
    pix_fmt: str = "yuv444p",
    options: dict[str, str] | None = None,
) -> bytes:
    """Encode a clip; `ticks` are the times of its frames in units of 1 / rate, if they are not 0, 1, 2, ..."""
    target = io.BytesIO()
    with av.open(target, "w", format=form) as container:
        chosen = {"threads": "1", **({"preset": "ultrafast", "crf": "4"} if codec == "libx264" else {})}
        stream: Any = container.add_stream(codec, rate=rate, options=chosen | (options or {}))
        first = picture(0)
        stream.width, stream.height, stream.pix_fmt = first.shape[1], first.shape[0], pix_fmt
        stream.gop_size = keyframes
        for k in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(k), format="rgb24")
            frame.pts = k if ticks is None else ticks[k]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return target.getvalue()
