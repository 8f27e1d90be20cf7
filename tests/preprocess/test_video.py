"""Clips: the frames that transformers would choose, the right pixels, true times, and nothing hostile gets far."""

from __future__ import annotations

import io
import re
import struct
from array import array
from dataclasses import replace
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from ftserve.engine.checkpoint import resolve
from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError, RequestCancelledError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.formats import ImageLimits
from ftserve.preprocess.images import PatchRules, normalize
from ftserve.preprocess.placeholders import expand
from ftserve.preprocess.qwen import QwenMedia, StepTimes
from ftserve.preprocess.sources import MediaSource
from ftserve.preprocess.video import VideoFile, VideoLimits
from ftserve.preprocess.video_rules import VideoRules
from tests.preprocess.clips import clip, number_of, numbered
from tests.preprocess.pictures import encoded, picture

QWEN2 = VideoRules(patches=PatchRules(min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28))
QWEN3 = VideoRules(
    patches=PatchRules(
        patch_size=16, min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32, mean=(0.5,) * 3, std=(0.5,) * 3
    ),
    spells_times=True,
)
LIMITS = VideoLimits()


@cache
def step_times() -> StepTimes:
    return StepTimes(resolve("tiny-vlm") / "tokenizer.json")


def handler(rules: VideoRules = QWEN2, limits: VideoLimits = LIMITS) -> QwenMedia:
    return QwenMedia(PatchRules(), rules, {}, ImageLimits(), limits, step_times() if rules.spells_times else None)


def spelled(item: MediaItem) -> list[float]:
    """Return the times that the prompt says before the steps of a clip."""
    text = step_times()._tokenizer.decode(list(item.replacement), skip_special_tokens=False)
    return [float(found) for found in re.findall(r"<([\d.]+) seconds>", text)]


def item_of(*pieces: bytes, rules: VideoRules = QWEN2, limits: VideoLimits = LIMITS, **options: float) -> MediaItem:
    source = MediaSource(modality=Modality.VIDEO, param="", options=tuple(options.items()))
    return handler(rules, limits).open(pieces, source).decode(b"key", lambda: True)


def shown(item: MediaItem, rules: VideoRules = QWEN2) -> list[int]:
    """Return the numbers of the frames in an item of a numbered clip."""
    depth, size = rules.patches.temporal_patch_size, rules.patches.patch_size
    frames = item.own_patches.reshape(item.grid[0], -1, 3, depth, size * size)
    return [number_of(np.moveaxis(frames[t, :, :, d], 1, -1)) for t in range(item.grid[0]) for d in range(depth)]


def processor(rules: VideoRules) -> Any:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    patches = rules.patches
    made: Any = (Qwen3VLVideoProcessor if rules.spells_times else Qwen2VLVideoProcessor)(
        size={"shortest_edge": patches.min_pixels, "longest_edge": patches.max_pixels},
        fps=rules.fps,
        cap_pixels_per_frame=False,
    )
    return made


@pytest.mark.parametrize("rules", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("rate", [1.0, 10.0, 24.0, 29.97, 60.0])
def test_the_frames_are_those_of_the_processor(rules: VideoRules, rate: float) -> None:
    from transformers.video_utils import VideoMetadata

    reference = processor(rules)
    for total in [*range(4, 130), 239, 240, 241, 1000, 5000, 50_000]:
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        expected = reference.sample_frames(metadata, fps=rules.fps)
        assert list(rules.choose(total, rate)) == np.asarray(expected).tolist(), total


@pytest.mark.parametrize("rules", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_clips_shorter_than_the_processor_takes_are_shown_whole(rules: VideoRules, total: int) -> None:
    assert 1 <= len(rules.choose(total, 30.0)) <= total


@pytest.mark.parametrize("rules", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("size", [(64, 48), (320, 240), (1280, 720), (90, 160), (401, 299), (300, 30)])
def test_pixels_equal_the_processors(rules: VideoRules, size: tuple[int, int]) -> None:
    from transformers.video_utils import VideoMetadata

    data = clip(9, rate=4, picture=lambda k: np.asarray(picture(*size, seed=k % 2)), pix_fmt="yuv444p")
    item = item_of(data, rules=rules)
    with av.open(io.BytesIO(data), "r") as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    expected = processor(rules)(
        videos=[np.moveaxis(frames[list(rules.choose(9, 4.0))], -1, 1)],
        video_metadata=[VideoMetadata(total_num_frames=9, fps=4.0)],
        do_sample_frames=False,
        return_tensors="np",
    )
    assert [list(item.grid)] == expected["video_grid_thw"].tolist()
    off = np.abs(normalize(item.own_patches, rules.patches) - expected["pixel_values_videos"])
    assert (off * 255 * max(rules.patches.std) > 2).mean() < 0.005


@pytest.mark.parametrize(("num_frames", "rate"), [(9, 4), (50, 10), (31, 30)])
def test_the_prompt_says_when_each_step_was_as_the_processor_does(num_frames: int, rate: int) -> None:
    """Qwen3-VL. The processor is given the frames that we choose, at the same size."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    item = item_of(clip(num_frames, rate=rate), rules=QWEN3)
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve("tiny-vlm"))
    chosen = list(QWEN3.choose(num_frames, rate))
    made: Any = Qwen3VLProcessor(Qwen2VLImageProcessorPil(), tokenizer, processor(QWEN3))
    expected = made(
        text="Look!<|vision_start|><|video_pad|><|vision_end|> Well?",
        videos=[np.stack([np.moveaxis(numbered(k), -1, 0) for k in chosen])],
        video_metadata=[VideoMetadata(total_num_frames=num_frames, fps=rate, frames_indices=chosen)],
        do_sample_frames=False,
        return_tensors="np",
    )["input_ids"][0].tolist()
    mark = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    prompt = array("I", tokenizer.encode("Look!<|vision_start|><|video_pad|><|vision_end|> Well?"))
    ids, spans = expand(prompt, [item], {Modality.VIDEO: mark})
    assert ids.tolist() == expected
    assert [span.step for span in spans] == list(range(item.grid[0]))
    for span in spans:
        assert set(ids[span.offset : span.offset + span.num_tokens]) == {mark}
        assert mark not in (ids[span.offset - 1], ids[span.offset + span.num_tokens])


@pytest.mark.parametrize("keyframes", [1, 7, 250])
def test_frames_are_distinct_and_in_order_wherever_keyframes_are(keyframes: int) -> None:
    """Case 21."""
    data = clip(50, keyframes=keyframes, options={"bf": "2", "preset": "veryfast", "crf": "4"})
    assert shown(item_of(data, num_frames=4)) == [0, 12, 25, 37]
    video = VideoFile(data, LIMITS)
    wanted = [0, 1, 5, 6, 13, 20, 21, 48, 49]
    assert [number_of(frame) for frame in video.frames(wanted)] == wanted


def test_groups_that_no_chosen_frame_lies_in_are_not_decoded() -> None:
    video = VideoFile(clip(50, keyframes=5), LIMITS)
    decoded = 0
    codec = video._stream.codec_context

    class Counting:
        def decode(self, packet: Any) -> Any:
            nonlocal decoded
            decoded += 1
            return codec.decode(packet)

        def flush_buffers(self) -> None:
            codec.flush_buffers()

    class Stream:
        codec_context = Counting()

    video._stream = Stream()  # type: ignore[assignment] # counts what goes through it
    assert [number_of(frame) for frame in video.frames([0, 30])] == [0, 30]
    assert decoded < 10


CODECS = [
    ("libx264", "mp4", "yuv420p"),
    ("libx264", "matroska", "yuv420p"),
    ("libx264", "mpegts", "yuv420p"),
    ("libx265", "mp4", "yuv420p"),
    ("libvpx-vp9", "webm", "yuv420p"),
    ("libsvtav1", "mp4", "yuv420p"),
    ("mjpeg", "avi", "yuvj420p"),
    ("mpeg4", "avi", "yuv420p"),
]


@pytest.mark.parametrize(("codec", "form", "pix_fmt"), CODECS, ids=str)
def test_codecs_and_containers(codec: str, form: str, pix_fmt: str) -> None:
    options = {"libx265": {"x265-params": "log-level=none:pools=none"}, "libsvtav1": {"preset": "12"}}.get(codec)
    data = clip(20, codec=codec, form=form, pix_fmt=pix_fmt, options=options)
    numbers = shown(item_of(data, num_frames=4))
    assert all(abs(number - expected) <= 1 for number, expected in zip(numbers, [0, 5, 10, 15], strict=True))
    assert len(set(numbers)) == 4


def test_times_are_true_where_the_rate_varies() -> None:
    ticks = [0, 1, 2, 3, 20, 21, 22, 60]
    video = VideoFile(clip(8, rate=10, ticks=ticks), LIMITS)
    assert video.times_s == pytest.approx([tick / 10 for tick in ticks])
    item = item_of(clip(8, rate=10, ticks=ticks), num_frames=8, rules=QWEN3)
    assert spelled(item) == pytest.approx([0.05, 0.25, 2.05, 4.1], abs=0.051)


def test_seconds_per_grid_equal_the_processors() -> None:
    item = item_of(clip(50, rate=10))
    assert item.grid[0] == 5
    assert item.second_per_grid == pytest.approx(2 / (10 / 50 * 10))


def rotated(data: bytes, matrix: tuple[int, ...]) -> bytes:
    """Write another display matrix into an MP4's track header."""
    at = data.index(b"tkhd") + 4 + 40
    assert data[at : at + 36] == struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    return data[:at] + struct.pack(">9i", *matrix) + data[at + 36 :]


def test_rotation_is_honoured() -> None:
    def half(_k: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        frame = np.zeros((48, 96, 3), np.uint8)
        frame[:24, :, 1] = 250
        return frame

    one = 1 << 16
    clockwise = (0, one, 0, -one, 0, 0, 0, 0, 1 << 30)  # a phone held upright
    video = VideoFile(rotated(clip(4, picture=half), clockwise), LIMITS)
    video.turn_upright()
    assert (video.width, video.height) == (48, 96)
    frame = next(iter(video.frames([0])))
    assert frame.shape == (96, 48, 3)
    assert frame[:, 30:, 1].mean() > 200
    assert frame[:, :18, 1].mean() < 50


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_animations_are_clips(form: str) -> None:
    frames = [Image.fromarray(numbered(k)) for k in range(12)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=250, **options)
    item = item_of(data, fps=2)
    assert shown(item) == [0, 2, 4, 6, 8, 10] or shown(item) == [0, 3, 6, 9]
    assert item.second_per_grid == pytest.approx(1.0, rel=0.6)


def test_frames_that_the_client_chose_are_all_shown() -> None:
    pictures = [encoded(Image.fromarray(numbered(k)), "PNG") for k in range(5)]
    item = item_of(*pictures, fps=4)
    assert shown(item) == [0, 1, 2, 3, 4, 4]
    assert item.second_per_grid == pytest.approx(0.5)
    assert spelled(item_of(*pictures, fps=4, rules=QWEN3)) == pytest.approx([0.125, 0.625, 1.0], abs=0.051)
    assert shown(item_of(*pictures, num_frames=2)) == [0, 2]


def test_options_choose_other_frames_and_sizes() -> None:
    data = clip(50)
    assert item_of(data, num_frames=8).grid[0] == 4
    assert item_of(data, fps=1.2).grid[0] == 3
    assert item_of(data, max_frames=6).grid[0] == 3
    assert item_of(data, max_pixels=28 * 28 * 16).num_tokens == 5 * 4 * 5
    for options in ({"num_frames": 10_000}, {"max_frames": 10_000}, {"fps": 1e9}, {"max_pixels": 1e9}):
        with pytest.raises(InvalidRequestError):
            item_of(data, **options)


def test_limits_are_checked_before_decoding() -> None:
    data = clip(50)
    for limits in (
        replace(LIMITS, max_bytes=100),
        replace(LIMITS, max_pixels=1000),
        replace(LIMITS, max_frames=49),
        replace(LIMITS, max_seconds=4.0),
    ):
        with pytest.raises(InvalidRequestError):
            VideoFile(data, limits)


def changing_avi() -> bytes:
    """Return an MJPEG AVI whose frames change their pixel format and size after the first."""
    first = clip(6, codec="mjpeg", form="avi", pix_fmt="yuvj444p")
    grey = encoded(Image.new("L", (64, 48), 90), "JPEG")
    parts = first.split(b"00dc")
    out = [parts[0]]
    for k, part in enumerate(parts[1:]):
        size = int.from_bytes(part[:4], "little")
        if 2 <= k < 6 and size >= len(grey) and part[4:6] == b"\xff\xd8":
            part = part[:4] + grey + bytes(size - len(grey)) + part[4 + size :]  # noqa: PLW2901
        out.append(part)
    return b"00dc".join(out)


@pytest.mark.parametrize("num_frames", [2, 4, 6])
def test_frames_that_change_their_format_are_decoded_or_refused(num_frames: int) -> None:
    """Case 22."""
    try:
        item = item_of(changing_avi(), num_frames=num_frames)
    except MediaError:
        return
    assert item.grid[0] == num_frames // 2


HOSTILE = {
    "nothing": b"",
    "text": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n" * 20,
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "header alone": clip(5)[:40],
    "audio only": b"OggS" + bytes(100),
    "noise in a container": b"\x00\x00\x00\x20ftypisom" + bytes(range(256)) * 50,
    "matroska noise": b"\x1a\x45\xdf\xa3" + bytes(range(256)) * 50,
    "transport noise": b"G" * 10_000,
    "truncated": clip(50)[:-3000],
    "empty animation": b"GIF89a" + bytes(20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_with_an_error_of_ours(name: str) -> None:
    with pytest.raises(FtserveError):
        item_of(HOSTILE[name])


def test_bits_flipped_anywhere_end_in_frames_or_an_error_of_ours() -> None:
    data = clip(12, keyframes=4)
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data)
        for at in rng.integers(0, len(data), 8):
            broken[at] ^= int(rng.integers(1, 256))
        try:
            item_of(bytes(broken), num_frames=4)
        except FtserveError:
            continue


def test_a_clip_that_nobody_wants_any_more_is_not_decoded_to_its_end() -> None:
    source = MediaSource(modality=Modality.VIDEO, param="")
    answers = iter([True, True, False])
    with pytest.raises(RequestCancelledError):
        handler().open((clip(50),), source).decode(b"key", lambda: next(answers))
