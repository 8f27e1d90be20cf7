"""Sound out of files through PyAV: packets first, for the true length, then mono samples at the model's rate.

Decoding streams: what is held is the compressed packets, a second of decoded sound, and the samples that come out. The
packets say beforehand how many those are, so a file that lies about its length ends at the room that it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError, RequestCancelledError
from ftserve.preprocess.containers import MOVIES, open_container, sniff

if TYPE_CHECKING:
    import av
    from av.audio.stream import AudioStream
    from av.filter import Graph

F32 = NDArray[np.float32]

MIN_RATE, MAX_RATE = 1000, 384_000  # samples a second; the resampler's filters grow with the ratio of two rates
MAX_CHANNELS = 32
_MAX_PACKETS = 1 << 18
_MAX_PEAK = 1e4  # sound is between -1 and 1; beyond this the squares of a spectrum would leave float32
_MAX_BROKEN = 10  # one packet of so many may be: what stands behind the last one is often no sound
_SLACK_S = 0.15  # delays of encoders, and their last block

_SIGNATURES = (
    *MOVIES,
    (8, b"WAVE", "wav"),
    (0, b"ID3", "mp3"),
    (0, b"fLaC", "flac"),
    *((0, bytes((0xFF, second)), "aac") for second in (0xF0, 0xF1, 0xF8, 0xF9)),  # ADTS
    *((0, bytes((0xFF, second)), "mp3") for second in (0xE2, 0xE3, 0xF2, 0xF3, 0xFA, 0xFB)),  # layer III
)
_TELLS_LENGTH = frozenset({"flac", "mov"})  # in the header; others leave it out, or it is guessed
_ENDLESS = 0x7FFFFF00  # bytes of a WAV's data: 0, or from so many on, says that they were written to a pipe
_CODECS = (
    "aac,alac,flac,mp3,mp3float,opus,libopus,vorbis,libvorbis,adpcm_ms,adpcm_ima_wav,pcm_alaw,pcm_mulaw,pcm_u8,"
    "pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """What a client may send. Checked before anything is decoded, but for what a file lies about."""

    max_bytes: int = 64 << 20
    max_seconds: float = 3600.0


class AudioFile:
    """A file whose packets of sound have been read. Owned by one thread at a time."""

    def __init__(self, data: bytes, limits: AudioLimits) -> None:
        """Read the header and the packets.

        Raises:
            InvalidRequestError: larger than `limits`.
            MediaError: no sound that we read, or not all of it.
        """
        if len(data) > limits.max_bytes:
            raise InvalidRequestError(f"An audio file of {len(data)} bytes; {limits.max_bytes} are allowed.")
        self._limits = limits
        if not data:
            raise MediaError("The audio file has no bytes.")
        reader = sniff(data, _SIGNATURES)
        if reader is None:
            raise MediaError("This is not audio in a format that is read: WAV, MP3, FLAC, Ogg, M4A, AAC, WebM.")
        try:
            if reader == "wav":
                data = _plain_wav(data)
            self._container = open_container(data, reader, {"codec_whitelist": _CODECS})
            self._stream = _audio_stream(self._container.streams.audio)
            announced_s = float((self._stream.duration or 0) * (self._stream.time_base or 0))
            self._check_length(announced_s)
            self._read_packets()
        except FtserveError:
            raise
        except Exception as exc:  # whatever a library makes of bytes that a client chose
            raise MediaError("The audio cannot be read.") from exc
        if reader in _TELLS_LENGTH and self.seconds < announced_s - _SLACK_S:
            raise MediaError("The audio ends before its header says.")

    def _read_packets(self) -> None:
        self._packets: list[av.Packet] = []
        unit, ticks = self._stream.time_base or 0, 0
        for packet in self._container.demux(self._stream):
            if packet.size:
                self._packets.append(packet)
                ticks += max(0, packet.duration or 0)
            if len(self._packets) > _MAX_PACKETS:
                raise InvalidRequestError("An audio file of too many pieces.")
            self._check_length(float(ticks * unit))
        if not self._packets:
            raise MediaError("The audio file has no sound in it.")
        marks = [packet.pts for packet in self._packets if packet.pts is not None]
        spanned = max(marks) - min(marks) if marks else 0  # some readers give no durations
        self.seconds = float(max(ticks, spanned) * unit)
        self._check_length(self.seconds)

    def _check_length(self, seconds: float) -> None:
        if seconds > self._limits.max_seconds + _SLACK_S:
            raise InvalidRequestError(f"Audio of more than {self._limits.max_seconds:g} seconds.")

    def samples(self, rate: int, is_wanted: Callable[[], bool] = lambda: True) -> F32:
        """Decode to mono at `rate` samples a second. Once.

        Raises:
            MediaError: it cannot be decoded, or is not what its packets say.
            RequestCancelledError: it is not wanted any more.
        """
        room = np.empty(math.ceil((1.1 * self.seconds + 1) * rate), np.float32)  # pages that are not written cost none
        count = 0
        for piece in self._pieces(rate):
            if not is_wanted():
                raise RequestCancelledError("The client has gone.")
            if count + len(piece) > len(room):
                raise MediaError("The audio is longer than its packets say.")
            room[count : count + len(piece)] = piece
            count += len(piece)
        if not count:
            raise MediaError("The audio file has no sound in it.")
        found = room[:count]
        if not np.abs(found).max() <= _MAX_PEAK:  # so written, it is true of what is no number too
            raise MediaError("The audio has samples that are no sound.")
        return found

    def _pieces(self, rate: int) -> Iterator[F32]:
        """Yield mono samples, about a second at a time."""
        try:
            mixer: _Mixer | None = None
            for frame in self._decoded():
                if mixer is None:
                    mixer = _Mixer(frame, rate)
                yield from mixer.put(frame)
            if mixer is not None:
                yield from mixer.put(None)
        except FtserveError:
            raise
        except Exception as exc:  # whatever a decoder makes of bytes that a client chose
            raise MediaError("The audio cannot be decoded.") from exc
        finally:
            self._container.close()

    def _decoded(self) -> Iterator[av.AudioFrame]:
        from av.error import InvalidDataError

        codec, num_broken = self._stream.codec_context, 0
        for packet in (*self._packets, None):
            try:
                frames = codec.decode(packet)
            except InvalidDataError:
                num_broken += 1
                if num_broken * _MAX_BROKEN > len(self._packets):
                    raise
                continue
            yield from frames


class _Mixer:
    """Frames of one form to mono samples at another rate: libavfilter's mixer and resampler.

    Mono is the mean of all channels, as in the libraries that models were trained with; ffmpeg's own mix is louder.
    """

    def __init__(self, like: av.AudioFrame, rate: int) -> None:
        """Make a mixer of frames like this one."""
        from av.filter import Graph

        self._form = _form(like)
        channels = like.layout.nb_channels
        _check_form(like.sample_rate, channels)
        mean = "+".join(f"{1 / channels}*c{k}" for k in range(channels))
        graph = self._graph = Graph()
        source = graph.add_abuffer(
            sample_rate=like.sample_rate, format=like.format, layout=like.layout, time_base=like.time_base
        )
        graph.link_nodes(
            source,
            graph.add("aformat", sample_fmts="flt"),
            graph.add("pan", f"mono|c0={mean}"),
            graph.add("aformat", sample_fmts="flt", sample_rates=str(rate), channel_layouts="mono"),
            graph.add("abuffersink"),
        ).configure()
        graph.set_audio_frame_size(rate)

    def put(self, frame: av.AudioFrame | None) -> Iterator[F32]:
        """Take a frame, or None at the end, and yield what is ready.

        Raises:
            MediaError: the frame is of another form.
        """
        if frame is not None and _form(frame) != self._form:
            raise MediaError("The audio changes its rate or its channels on the way.")
        self._graph.push(frame)
        while (ready := _pull(self._graph)) is not None:
            yield ready.to_ndarray()[0]


def _pull(graph: Graph) -> av.AudioFrame | None:
    import av

    try:
        frame = graph.pull()
    except (BlockingIOError, EOFError):  # more has to go in; all has come out
        return None
    assert isinstance(frame, av.AudioFrame)
    return frame


def _form(frame: av.AudioFrame) -> tuple[int, str, str]:
    return frame.sample_rate, frame.format.name, frame.layout.name


def _audio_stream(streams: tuple[AudioStream, ...]) -> AudioStream:
    if not streams:
        raise MediaError("The file has no sound in it.")
    stream = streams[0]
    codec = stream.codec_context
    if codec.name not in _CODECS.split(","):
        raise MediaError("The audio is coded in a way that is not read.")
    _check_form(codec.sample_rate, codec.layout.nb_channels)
    codec.thread_count = 1  # the pool is what uses the cores
    return stream


def _check_form(rate: int, channels: int) -> None:
    if not (MIN_RATE <= rate <= MAX_RATE and 1 <= channels <= MAX_CHANNELS):
        raise MediaError(
            f"Audio of {rate} samples a second in {channels} channels; {MIN_RATE} to {MAX_RATE} and up to "
            f"{MAX_CHANNELS} are read."
        )


def _plain_wav(data: bytes) -> bytes:
    """Return the form and the sound of a WAV alone: ffmpeg makes room for whatever else one says that it has.

    Raises:
        MediaError: not all of it is there.
    """
    form, at = b"", 12
    while data[:4] == b"RIFF" and at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        body = data[at + 8 : at + 8 + size] if 0 < size < _ENDLESS else data[at + 8 :]
        if 0 < size < _ENDLESS and len(body) < size:
            raise MediaError("The audio ends before its header says.")
        if name == b"data":
            return b"".join(
                (b"RIFF", _size(20 + len(form) + len(body)), b"WAVE", _chunk(b"fmt ", form), _chunk(name, body))
            )
        if name == b"fmt ":
            form = body
        at += 8 + size + size % 2
    raise MediaError("The audio file has no sound in it.")


def _chunk(name: bytes, body: bytes) -> bytes:
    return name + _size(len(body)) + body


def _size(size: int) -> bytes:
    return size.to_bytes(4, "little")
