"""Frames out of video files through PyAV: an index first, then only the packets that the chosen frames need.

The index is made of the packets, without decoding: it has the exact number of frames and their exact times, also where
the rate varies. Decoding jumps over every group of pictures that no chosen frame lies in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError
from ftserve.preprocess.containers import MOVIES, open_container, sniff

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

U8 = NDArray[np.uint8]

DEFAULT_RATE = 24.0  # frames per second of what does not tell, as transformers assumes
_MAX_PACKETS = 1 << 18

_SIGNATURES = (
    *MOVIES,
    (8, b"AVI ", "avi"),
    (0, b"FLV\x01", "flv"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
    (0, b"G", "mpegts"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """What a client may send. Checked before anything is decoded, but for what a file lies about."""

    max_bytes: int = 64 << 20
    max_pixels: int = 1 << 24  # of a frame: 4096 x 4096
    max_frames: int = 1 << 16  # in the file; how many are looked at is the model's
    max_seconds: float = 3600.0


class Clip(Protocol):
    """Frames in order, whatever they come from. Owned by one thread at a time."""

    height: int  # upright once `turn_upright` was called
    width: int
    rate: float  # frames per second, on average
    times_s: Sequence[float]  # of each frame, from the first

    def turn_upright(self) -> None:
        """Find out how the frames are turned; a video says it beside its first frame. Raises FtserveError."""

    def frames(self, indices: Sequence[int]) -> Iterator[U8]:
        """Yield those frames, `[height, width, 1, 3 or 4]` of any size, turned upright. Once; raises FtserveError."""


class VideoFile:
    """A video file whose packets have been read."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        """Read the header and the packets.

        Raises:
            InvalidRequestError: larger than `limits`.
            MediaError: no video that we read.
        """
        if len(data) > limits.max_bytes:
            raise InvalidRequestError(f"A video of {len(data)} bytes; {limits.max_bytes} are allowed.")
        self._limits = limits
        try:
            self._container = _open(data, limits)
            self._stream = _video_stream(self._container)
            self._read_packets()
        except FtserveError:
            raise
        except Exception as exc:  # whatever a library makes of bytes that a client chose
            raise MediaError("The video cannot be read.") from exc

    def _read_packets(self) -> None:
        stream, limits = self._stream, self._limits
        self.width, self.height = stream.codec_context.width, stream.codec_context.height
        self._quarter_turns = 0  # anticlockwise
        self._check_size(self.width, self.height)
        self._packets: list[av.Packet] = []
        for packet in self._container.demux(stream):
            if packet.size:
                self._packets.append(packet)
            if len(self._packets) > _MAX_PACKETS:
                break
        shown = [packet for packet in self._packets if not packet.is_discard]
        if not shown:
            raise MediaError("The video has no frames.")
        if len(shown) > limits.max_frames:
            raise InvalidRequestError(f"A video of more than {limits.max_frames} frames.")
        self._marks = sorted(packet.pts for packet in shown if packet.pts is not None)
        rate = float(stream.average_rate or stream.base_rate or 0)
        self._has_times = len(self._marks) == len(shown) and len(set(self._marks)) == len(shown)
        if self._has_times:
            base = stream.time_base or Fraction(0)  # multiplied before it is divided by: one rounding
            self.times_s: Sequence[float] = [
                (mark - self._marks[0]) * base.numerator / base.denominator for mark in self._marks
            ]
            if self.times_s[-1] > 0:
                measured = (len(shown) - 1) / self.times_s[-1]
                rate = rate if measured / 2 < rate < measured * 2 else measured  # a header may say anything
        else:
            self._marks = list(range(len(shown)))
            self.times_s = [k / (rate or DEFAULT_RATE) for k in self._marks]
        self.rate = rate or DEFAULT_RATE
        if self.times_s[-1] > limits.max_seconds:
            raise InvalidRequestError(f"A video of more than {limits.max_seconds:g} seconds.")
        self._index_keyframes()

    def _index_keyframes(self) -> None:
        """Find out where decoding can begin: packet numbers with the times from which on they serve, both ascending."""
        self._keyframes: list[int] = []
        self._key_marks: list[int] = []
        if self._has_times:
            for k, packet in enumerate(self._packets):
                mark = packet.pts
                if packet.is_keyframe and mark is not None and (not self._key_marks or mark > self._key_marks[-1]):
                    self._keyframes.append(k)
                    self._key_marks.append(mark)

    def turn_upright(self) -> None:
        try:
            for frame in self._decoded([self._marks[0]]):
                self._quarter_turns = round(frame.rotation / 90) % 4
                if self._quarter_turns % 2:
                    self.width, self.height = self.height, self.width
                break
            self._stream.codec_context.flush_buffers()
        except Exception as exc:  # whatever a decoder makes of bytes that a client chose
            raise MediaError("The video cannot be decoded.") from exc

    def frames(self, indices: Sequence[int]) -> Iterator[U8]:
        from av.video.reformatter import VideoReformatter

        convert = VideoReformatter().reformat  # it keeps its tables from frame to frame
        num_frames = 0
        try:
            for frame in self._decoded([self._marks[k] for k in indices]):
                self._check_size(frame.width, frame.height)
                pixels: U8 = convert(frame, format="rgb24").to_ndarray().astype(np.uint8, copy=False)
                num_frames += 1
                yield np.ascontiguousarray(np.rot90(pixels, self._quarter_turns)) if self._quarter_turns else pixels
        except FtserveError:
            raise
        except Exception as exc:  # whatever a decoder makes of bytes that a client chose
            raise MediaError("The video cannot be decoded.") from exc
        finally:
            self._container.close()
        if not num_frames:
            raise MediaError("The video has no frames that can be decoded.")

    def _decoded(self, wanted: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Yield the first frame at or after each mark, which ascend; fewer if the file ends before."""
        codec = self._stream.codec_context
        position, num_done, num_seen = 0, 0, 0
        while num_done < len(wanted) and position <= len(self._packets):
            start = self._start(wanted[num_done])
            if start > position:
                codec.flush_buffers()
                position = start
            for frame in codec.decode(self._packets[position] if position < len(self._packets) else None):
                mark = frame.pts if self._has_times and frame.pts is not None else num_seen
                num_seen += 1
                while num_done < len(wanted) and mark >= wanted[num_done]:
                    num_done += 1
                    yield frame
            position += 1

    def _start(self, mark: int) -> int:
        """Return the packet from which on everything must be decoded to see the frame at `mark`."""
        place = bisect_right(self._key_marks, mark)
        return self._keyframes[place - 1] if place else 0

    def _check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise MediaError("The video has no pixels.")
        if width * height > self._limits.max_pixels:
            raise InvalidRequestError(
                f"A video of {width}x{height} pixels; {self._limits.max_pixels} a frame are allowed."
            )


def _open(data: bytes, limits: VideoLimits) -> InputContainer:
    reader = sniff(data, _SIGNATURES)
    if reader is None:
        raise MediaError("This is not a video in a format that is read: MP4, WebM, AVI, Ogg, FLV, MPEG, GIF, WebP.")
    return open_container(data, reader, {"max_pixels": str(limits.max_pixels)})


def _video_stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise MediaError("The file has no video in it.")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # the pool is what uses the cores
    stream.thread_type = "NONE"
    return stream
