"""Sound out of files: true samples at any rate, and nothing hostile gets far."""

from __future__ import annotations

import io
import resource
import struct
from functools import cache
from typing import Any

import av
import numpy as np
import pytest

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError, RequestCancelledError
from ftserve.preprocess.audio import F32, AudioFile, AudioLimits
from tests.preprocess.clips import clip, numbered
from tests.preprocess.pictures import encoded, picture
from tests.preprocess.sounds import coded, tone, wav

LIMITS = AudioLimits()
CODED = [
    ("libmp3lame", "mp3", 44100),
    ("libmp3lame", "mp3", 22050),
    ("flac", "flac", 48000),
    ("libopus", "ogg", 48000),
    ("libvorbis", "ogg", 44100),
    ("aac", "ipod", 44100),
    ("aac", "adts", 44100),
    ("libopus", "webm", 48000),
    ("pcm_s24le", "wav", 96000),
    ("pcm_mulaw", "wav", 8000),
]


def heard(data: bytes, rate: int = 16000, limits: AudioLimits = LIMITS) -> F32:
    return AudioFile(data, limits).samples(rate)


def error(found: F32, true: F32) -> float:
    """Return how far samples are off, relative to the loudest, away from both ends."""
    margin = len(true) // 10
    return float(np.abs(found[margin:-margin] - true[: len(found)][margin:-margin]).max() / np.abs(true).max())


def test_samples_at_the_right_rate_come_as_they_are() -> None:
    samples = tone(0.7, seed=1)
    stored = (samples * 32767).round().astype(np.float32) / 32768
    assert np.array_equal(heard(wav(samples)), stored)
    assert np.array_equal(heard(wav(samples, as_float=True)), samples)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 44100, 48000, 96000, 192000])
@pytest.mark.parametrize("wanted", [16000, 24000])
def test_a_tone_stays_a_tone_at_any_rate(rate: int, wanted: int) -> None:
    found = heard(wav(tone(1.0, rate, 1000.0), rate), wanted)
    assert abs(len(found) - wanted) <= 1
    assert error(found, tone(1.0, wanted, 1000.0)) < 2e-3


def test_what_the_lower_rate_cannot_hold_is_filtered_out() -> None:
    found = heard(wav(tone(1.0, 48000, 12000.0), 48000))
    assert np.abs(found[1600:-1600]).max() < 0.01  # else it would be heard at 4000 Hz


@pytest.mark.parametrize("channels", [2, 3, 6, 8])
def test_channels_become_their_mean(channels: int) -> None:
    samples = np.stack([tone(0.5, hertz=200.0 * (k + 1)) for k in range(channels)], axis=1)
    found = heard(wav(samples, as_float=True))
    assert np.allclose(found, samples.mean(axis=1), atol=1e-5)


@pytest.mark.parametrize(("codec", "form", "rate"), CODED)
def test_what_clients_send_is_heard(codec: str, form: str, rate: int) -> None:
    data = coded(np.stack([tone(2.0, rate)] * 2, axis=1), rate, codec, form)
    opened = AudioFile(data, LIMITS)
    found = opened.samples(16000)
    assert abs(opened.seconds - 2.0) < 0.15
    assert abs(len(found) / 16000 - 2.0) < 0.1
    spectrum = np.abs(np.fft.rfft(found[4000:20000]))
    assert spectrum.argmax() == 440  # a bin is a hertz
    assert abs(np.abs(found[4000:20000]).max() - 0.5) < 0.05


def test_the_sound_of_a_video_is_heard() -> None:
    with pytest.raises(MediaError, match="no sound in it"):
        heard(clip(5))
    assert len(heard(_movie(tone(1.0, 44100), 44100))) > 15000


def _movie(samples: F32, rate: int) -> bytes:
    """Return a video with sound."""
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        pictures: Any = container.add_stream("libx264", rate=10, options={"preset": "ultrafast"})
        sound: Any = container.add_stream("aac", rate=rate, layout="mono")
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        for k in range(10):
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(numbered(k), format="rgb24")))
        for start in range(0, len(samples) - 1024, 1024):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate = rate
            container.mux(sound.encode(frame))
        container.mux([*pictures.encode(None), *sound.encode(None)])
    return target.getvalue()


def test_a_wav_written_to_a_pipe_is_heard() -> None:
    for declared in (0, 2**32 - 1, 2**31 - 1):
        data = wav(tone(1.0), declared=declared)
        assert len(heard(data)) == 16000, declared


@cache
def hostile() -> dict[str, bytes]:
    sound = tone(2.0, seed=3)
    good = wav(sound)
    flac, mp3, m4a, ogg = (
        coded(tone(4.0, 44100, seed=2), 44100, codec, form)
        for codec, form in (("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "ipod"), ("libvorbis", "ogg"))
    )
    noise = np.random.default_rng(1).bytes(20000)
    loud = sound.copy()
    loud[100] = np.inf
    silly = sound.copy()
    silly[100] = np.nan
    return {
        "nothing": b"",
        "text": b"This is a text, not a sound.",
        "a picture": encoded(picture(64, 64)),
        "a playlist": b"#EXTM3U\nfile:///etc/passwd\n",
        "half a header": good[:30],
        "a header alone": good[:44],
        "truncated WAV": good[: len(good) // 2],
        "truncated FLAC": flac[: len(flac) // 2],
        "truncated M4A": m4a[: len(m4a) // 2],
        "noise as MP3": b"\xff\xfb" + noise,
        "noise behind an ID3 header": b"ID3\x04" + noise,
        "noise as FLAC": b"fLaC" + noise,
        "noise as Ogg": ogg[:200] + noise,
        "noise as WAV": b"RIFF" + noise[:4] + b"WAVE" + noise,
        "noise as M4A": noise[:4] + b"ftyp" + noise,
        "noise within a FLAC": flac[:9000] + noise + flac[29000:],
        "no rate": wav(sound, 0),
        "a rate of 1 GHz": wav(sound, 2**30),
        "a rate of 1": wav(sound, 1),
        "1000 channels": wav(sound[:32000].reshape(32, 1000)),
        "infinite samples": wav(loud, as_float=True),
        "no numbers": wav(silly, as_float=True),
        "two rates": _chained(mp3, coded(tone(4.0, 22050), 22050, "libmp3lame", "mp3")),
    }


def _chained(first: bytes, second: bytes) -> bytes:
    """Return MP3 frames of one file behind those of another, without the second's tag."""
    return first + second[second.index(b"\xff\xf3") :]


@pytest.mark.parametrize("name", hostile())
def test_hostile_files_are_refused_with_a_text_of_ours(name: str) -> None:
    with pytest.raises(FtserveError) as failure:
        heard(hostile()[name])
    assert isinstance(failure.value, MediaError | InvalidRequestError)
    assert not any(word in failure.value.message for word in ("av", "Errno", "Error", "passwd"))


def test_a_wav_may_say_more_than_its_sound_but_ffmpeg_does_not_believe_it() -> None:
    good = wav(tone(1.0))
    for size in (10, 2**31 - 2):
        info = b"LIST" + struct.pack("<I", 16) + b"INFO" + b"ISFT" + struct.pack("<I", size) + bytes(4)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for data in (good[:36] + info + good[36:], good + info):
            assert len(heard(data)) == 16000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_trailing_junk_is_not_heard_but_does_no_harm() -> None:
    data = coded(tone(2.0, 44100), 44100, "libmp3lame", "mp3")
    assert len(heard(data + b"TAG" + bytes(125))) == len(heard(data))


def test_limits_are_checked_before_anything_is_decoded() -> None:
    limits = AudioLimits(max_bytes=1 << 20, max_seconds=10.0)
    for data in (
        wav(tone(10.5)),
        coded(tone(11.0, 44100), 44100, "libmp3lame", "mp3"),
        coded(tone(11.0, 48000), 48000, "libopus", "webm"),
    ):
        with pytest.raises(InvalidRequestError, match="more than 10 seconds"):
            AudioFile(data, limits)
    assert len(heard(wav(tone(10.0)), limits=limits)) == 160000
    with pytest.raises(InvalidRequestError, match="bytes; 1048576 are allowed"):
        AudioFile(bytes(2 << 20), limits)


def test_a_client_that_leaves_ends_the_decoding() -> None:
    asked = []

    def is_wanted() -> bool:
        asked.append(True)
        return len(asked) < 3

    opened = AudioFile(wav(tone(60.0)), LIMITS)
    with pytest.raises(RequestCancelledError):
        opened.samples(16000, is_wanted)
    assert len(asked) == 3
