"""What the Qwen-VL family makes of images and videos, behind the intake's interface."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftserve.engine.errors import InvalidRequestError, RequestCancelledError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.animation import Animation, FrameList
from ftserve.preprocess.formats import ImageLimits, open_image
from ftserve.preprocess.images import PatchRules, PatchWriter, image_item, resize
from ftserve.preprocess.sources import MediaSource, Payload
from ftserve.preprocess.tokens import ID_TYPECODE
from ftserve.preprocess.video import Clip, VideoFile, VideoLimits
from ftserve.preprocess.video_rules import VideoRules

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

MIN_FPS, MAX_FPS = 0.01, 240.0
_SPELLING_TIMES = frozenset({"qwen3_vl", "qwen3_vl_moe"})


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image whose header has been read."""

    image: ImageFile
    rules: PatchRules

    @property
    def pixels(self) -> int:
        return self.image.width * self.image.height

    def decode(self, key: bytes, _is_wanted: Callable[[], bool]) -> MediaItem:
        return image_item(self.image, self.rules, key)


class StepTimes:
    """Writes in the prompt when each step of a clip was, as Qwen3-VL's processor does. Any thread."""

    def __init__(self, tokenizer_json: Path) -> None:
        """Read the tokenizer of the model."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_json))

    def ids(self, times_s: Sequence[float], tokens_per_step: int) -> array[int]:
        """Return what stands for a clip in the prompt: before the placeholders of each step its time.

        The texts lie between special tokens, so that they are tokens of their own.
        """
        pieces = [
            f"<{time:.1f} seconds><|vision_start|>{'<|video_pad|>' * tokens_per_step}<|vision_end|>" for time in times_s
        ]
        return array(ID_TYPECODE, self._tokenizer.encode("".join(pieces), add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class OpenedClip:
    """A clip whose headers have been read."""

    clip: Clip
    rules: VideoRules
    step_times: StepTimes | None  # None: the prompt does not say them

    @property
    def pixels(self) -> int:
        """What is held at once: all the frames as the model sees them, and one as it is in the file."""
        clip = self.clip
        num_frames = len(self.rules.choose(len(clip.times_s), clip.rate))
        return num_frames * math.prod(self.rules.fit(num_frames, clip.height, clip.width)) + clip.width * clip.height

    def decode(self, key: bytes, is_wanted: Callable[[], bool]) -> MediaItem:
        clip, rules = self.clip, self.rules
        clip.turn_upright()
        indices = rules.choose(len(clip.times_s), clip.rate)
        size = rules.fit(len(indices), clip.height, clip.width)
        writer = PatchWriter(len(indices), size, rules.patches)
        for pixels in clip.frames(indices):
            if not is_wanted():
                raise RequestCancelledError("The client has gone.")
            writer.put(resize(pixels, size))
        depth = rules.patches.temporal_patch_size
        times_s = _step_times([clip.times_s[k] for k in indices], depth)
        num_tokens = math.prod(writer.grid) // rules.patches.merge_size**2
        return MediaItem(
            modality=Modality.VIDEO,
            patches=writer.finish(),
            grid=writer.grid,
            num_tokens=num_tokens,
            digest=key,
            second_per_grid=depth / (len(indices) / len(clip.times_s) * clip.rate),
            replacement=() if self.step_times is None else self.step_times.ids(times_s, num_tokens // len(times_s)),
        )


def _step_times(times_s: Sequence[float], depth: int) -> tuple[float, ...]:
    """Return the middle of each step's first and last frame; the last frame stands in for missing ones."""
    last = len(times_s) - 1
    return tuple((times_s[k] + times_s[min(k + depth - 1, last)]) / 2 for k in range(0, len(times_s), depth))


class QwenMedia:
    """Immutable; shared by all threads."""

    def __init__(
        self,
        images: PatchRules,
        videos: VideoRules,
        marks: Mapping[Modality, int],
        image_limits: ImageLimits,
        video_limits: VideoLimits,
        step_times: StepTimes | None = None,
    ) -> None:
        self.marks = marks
        self._step_times = step_times
        self.max_bytes = max(image_limits.max_bytes, video_limits.max_bytes)
        self._images = images
        self._videos = videos
        self._image_limits = image_limits
        self._video_limits = video_limits

    @classmethod
    def read(
        cls,
        directory: Path,
        model_type: str,
        marks: Mapping[Modality, int],
        image_limits: ImageLimits,
        video_limits: VideoLimits,
    ) -> QwenMedia:
        """Read the rules from a model's directory; `marks` are its placeholders.

        Raises:
            ValueError: its processor is configured in a way that we do not reproduce.
        """
        videos = VideoRules.read(directory, spells_times=model_type in _SPELLING_TIMES)
        step_times = StepTimes(directory / "tokenizer.json") if videos.spells_times else None
        return cls(PatchRules.read(directory), videos, marks, image_limits, video_limits, step_times)

    def options(self, source: MediaSource) -> bytes:
        rules = self._image_rules(source) if source.modality is Modality.IMAGE else self._video_rules(source)
        return f"{source.modality.value} {rules!r}".encode()

    def open(self, payload: Payload, source: MediaSource) -> OpenedImage | OpenedClip:
        if source.modality is Modality.IMAGE:
            image = open_image(payload[0], self._image_limits)
            image_rules = self._image_rules(source)
            image_rules.fit(image.height, image.width)
            return OpenedImage(image, image_rules)
        rules, limits = self._video_rules(source), self._video_limits
        if len(payload) > 1:
            return OpenedClip(FrameList(payload, limits, rules.fps), replace(rules, fps=math.inf), self._step_times)
        data = payload[0]
        is_picture = data.startswith((b"GIF8", b"\xff\xd8\xff")) or data[8:12] == b"WEBP"
        return OpenedClip(Animation(data, limits) if is_picture else VideoFile(data, limits), rules, self._step_times)

    def _image_rules(self, source: MediaSource) -> PatchRules:
        return _sized(self._images, dict(source.options))

    def _video_rules(self, source: MediaSource) -> VideoRules:
        own, asked = self._videos, dict(source.options)
        if not asked:
            return own
        fps = asked.get("fps", own.fps)
        if not MIN_FPS <= fps <= MAX_FPS:
            raise InvalidRequestError(f"'fps' must be from {MIN_FPS} to {MAX_FPS}.", param="mm_processor_kwargs")
        most = int(asked.get("max_frames", own.max_frames))
        count = asked.get("num_frames", own.num_frames)
        if most > own.max_frames or (count is not None and count > own.max_frames):
            raise InvalidRequestError(
                f"This model takes at most {own.max_frames} frames of a video.", param="mm_processor_kwargs"
            )
        return replace(
            own,
            patches=_sized(own.patches, asked),
            fps=fps,
            min_frames=int(min(asked.get("min_frames", own.min_frames), most)),
            max_frames=max(1, most),
            num_frames=None if count is None or ("fps" in asked and "num_frames" not in asked) else int(count),
        )


def _sized(own: PatchRules, asked: dict[str, float]) -> PatchRules:
    """Return `own` with the pixels that a request asked for, which must lie within what the model takes."""
    if not asked.keys() & {"min_pixels", "max_pixels"}:
        return own
    highest = int(asked.get("max_pixels", own.max_pixels))
    lowest = int(asked.get("min_pixels", min(own.min_pixels, highest)))
    if not own.factor**2 <= lowest <= highest <= own.max_pixels:
        raise InvalidRequestError(
            f"'min_pixels' and 'max_pixels' must be from {own.factor**2} to {own.max_pixels}, in that order.",
            param="mm_processor_kwargs",
        )
    return replace(own, min_pixels=lowest, max_pixels=highest)
