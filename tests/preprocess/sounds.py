"""Audio files for the tests: WAV by hand, the rest with PyAV."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def tone(seconds: float = 1.0, rate: int = 16000, hertz: float = 440.0, seed: int | None = None) -> F32:
    """Return a tone of half the full volume, with noise over it if `seed` is given; `[samples]`."""
    samples = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    if seed is not None:
        samples = 0.5 * samples + np.random.default_rng(seed).uniform(-0.2, 0.2, len(samples))
    return samples.astype(np.float32)


def wav(samples: F32, rate: int = 16000, *, declared: int | None = None, as_float: bool = False) -> bytes:
    """Write `[samples]` or `[samples, channels]` as WAV; `declared` stands in for the length of the data."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    data = samples.astype("<f4").tobytes() if as_float else (samples * 32767).round().astype("<i2").tobytes()
    width = 4 if as_float else 2
    form = struct.pack(
        "<HHIIHH", 3 if as_float else 1, channels, rate, rate * channels * width, channels * width, 8 * width
    )
    size = len(data) if declared is None else declared
    head = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", min(len(head) + size, 2**32 - 1)) + head + data


def coded(samples: F32, rate: int, codec: str, form: str) -> bytes:
    """Encode `[samples]` or `[samples, channels]`."""
    target = io.BytesIO()
    planes = np.ascontiguousarray(np.atleast_2d(samples.T))
    layout = "mono" if len(planes) == 1 else "stereo"
    with av.open(target, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        whole = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        whole.sample_rate = rate
        fifo = av.AudioFifo()
        for frame in av.AudioResampler(stream.codec_context.format.name, layout, rate).resample(whole):
            fifo.write(frame)
        step = stream.codec_context.frame_size or 1024
        while (piece := fifo.read(step)) or (piece := fifo.read()):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return target.getvalue()
