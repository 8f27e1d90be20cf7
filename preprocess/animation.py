"""Clips that are pictures: animated GIF and WebP, and lists of frames that a client has cut itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError
from ftserve.preprocess.formats import ImageLimits, open_image
from ftserve.preprocess.images import decode
from ftserve.preprocess.pixels import as_array, is_on_its_side, oriented
from ftserve.preprocess.video import DEFAULT_RATE, VideoLimits

U8 = NDArray[np.uint8]

_DEFAULT_DELAY_MS = 100  # what browsers take for a frame that says nothing


class Animation:
    """An animated GIF or WebP whose frames have been counted."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        """Read the headers of all frames.

        Raises:
            InvalidRequestError: larger than `limits`.
            MediaError: no animation that we read.
        """
        self._image = open_image(data, ImageLimits(max_bytes=limits.max_bytes, max_pixels=limits.max_pixels))
        self.width, self.height = self._image.size
        try:
            num_frames = int(getattr(self._image, "n_frames", 1))
        except Exception as exc:  # whatever a decoder makes of bytes that a client chose
            raise MediaError("The animation cannot be read.") from exc
        if num_frames > limits.max_frames:
            raise InvalidRequestError(f"A video of more than {limits.max_frames} frames.")
        self._num_frames = num_frames
        self.times_s: Sequence[float] = self._times()
        if self.times_s[-1] > limits.max_seconds:
            raise InvalidRequestError(f"A video of more than {limits.max_seconds:g} seconds.")
        self.rate = (num_frames - 1) / self.times_s[-1] if self.times_s[-1] > 0 else DEFAULT_RATE

    def _times(self) -> Sequence[float]:
        """Return when each frame begins; GIF says how long a frame lasts in its header, WebP once it is decoded."""
        times, now = [], 0.0
        try:
            for k in range(self._num_frames):
                self._image.seek(k)
                if self._image.format == "WEBP":
                    self._image.load()
                times.append(now)
                now += (self._image.info.get("duration") or _DEFAULT_DELAY_MS) / 1e3
        except Exception as exc:  # whatever a decoder makes of bytes that a client chose
            raise MediaError("The animation cannot be read.") from exc
        return times

    def turn_upright(self) -> None:
        """Nothing to do: these formats have no orientation."""

    def frames(self, indices: Sequence[int]) -> Iterator[U8]:
        try:
            for k in indices:
                self._image.seek(k)
                frame = self._image.copy()
                yield as_array(decode(frame))
        except FtserveError:
            raise
        except Exception as exc:  # whatever a decoder makes of bytes that a client chose
            raise MediaError("The animation cannot be decoded.") from exc


class FrameList:
    """Pictures that a client has cut out of a clip, at `rate` frames per second."""

    def __init__(self, pictures: Sequence[bytes], limits: VideoLimits, rate: float) -> None:
        """Read the first header.

        Raises:
            InvalidRequestError: larger than `limits`.
            MediaError: the first is no picture that we read.
        """
        if len(pictures) > limits.max_frames:
            raise InvalidRequestError(f"A video of more than {limits.max_frames} frames.")
        self._pictures = pictures
        self._limits = ImageLimits(max_bytes=limits.max_bytes, max_pixels=limits.max_pixels)
        self.width, self.height = open_image(pictures[0], self._limits).size
        self.rate = rate
        self.times_s: Sequence[float] = [k / rate for k in range(len(pictures))]

    def turn_upright(self) -> None:
        first = open_image(self._pictures[0], self._limits)
        if is_on_its_side(first):
            self.width, self.height = self.height, self.width

    def frames(self, indices: Sequence[int]) -> Iterator[U8]:
        for k in indices:
            picture = open_image(self._pictures[k], self._limits)
            pixels = as_array(decode(picture))
            yield oriented(pixels.transpose(2, 0, 1), picture).transpose(1, 2, 0)
