"""Which frames of a clip the Qwen-VL family looks at, and how large; after transformers' video processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftserve.engine.errors import InvalidRequestError
from ftserve.preprocess.images import MAX_ASPECT_RATIO, PatchRules, read_processor_config


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """How clips are sampled and sized, as the model's processor configuration says."""

    patches: PatchRules
    spells_times: bool = False  # Qwen3-VL: frames from the first to the last, times in the prompt, pixels by the clip
    fps: float = 2.0  # to look at; infinite for frames that were chosen already
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None  # instead of `fps`

    @classmethod
    def read(cls, directory: Path, *, spells_times: bool) -> VideoRules:
        """Read the rules for videos from a model's directory; Qwen3-VL `spells_times`, older ones do not.

        Raises:
            ValueError: the configuration asks for something that we do not reproduce; names it.
        """
        config = read_processor_config(
            directory, "video_processor", "video_preprocessor_config.json", "preprocessor_config.json"
        )
        if config.get("cap_pixels_per_frame"):
            raise ValueError("video processor configuration: cap_pixels_per_frame is not reproduced")
        side = 32 if spells_times else 28
        centre = (0.5, 0.5, 0.5)
        patches = PatchRules.from_config(
            config,
            min_pixels=128 * side**2,
            max_pixels=768 * side**2,
            **({"patch_size": 16, "mean": centre, "std": centre} if spells_times else {}),
        )
        given = {name: config.get(name) for name in ("fps", "min_frames", "max_frames", "num_frames")}
        return cls(
            patches=patches,
            spells_times=spells_times,
            **{name: value for name, value in given.items() if value is not None},
        )

    def choose(self, num_frames: int, rate: float) -> Sequence[int]:
        """Return the frames to look at, ascending, of a clip of `num_frames` at `rate` frames per second."""
        if self.num_frames is None and self.fps == math.inf and num_frames <= self.max_frames:
            return range(num_frames)
        wanted = self._count(num_frames, rate)
        if self.spells_times:
            return [int(k) for k in np.linspace(0, num_frames - 1, wanted).round()]
        # transformers steps through it in single precision, and cuts.
        return [int(k) for k in np.arange(0, num_frames, num_frames / wanted).astype(np.float32)]

    def _count(self, num_frames: int, rate: float) -> int:
        if self.spells_times:
            wanted = int(min(num_frames / rate * self.fps, num_frames)) if self.num_frames is None else self.num_frames
            return max(1, min(max(wanted, self.min_frames), self.max_frames, num_frames))
        depth = self.patches.temporal_patch_size
        if self.num_frames is not None:
            wanted = round(min(self.num_frames, self.max_frames, num_frames) / depth) * depth
        else:
            most = math.floor(min(self.max_frames, num_frames) / depth) * depth
            sampled = min(max(num_frames / rate * self.fps, self.min_frames), most, num_frames)
            wanted = math.floor(sampled / depth) * depth
        return min(max(wanted, 1), num_frames)

    def fit(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the size (height, width) of each frame that is looked at.

        Raises:
            InvalidRequestError: the clip is longer than 200 times its width, or the other way round.
        """
        if not self.spells_times:
            return self.patches.fit(height, width)
        rules = self.patches
        factor, depth = rules.factor, rules.temporal_patch_size
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InvalidRequestError(f"A video of {width}x{height} pixels is too narrow for this model.")
        rows, columns = round(height / factor), round(width / factor)
        steps = round(num_frames / depth) * depth
        if steps * rows * columns * factor**2 > rules.max_pixels:
            shrink = math.sqrt((num_frames * height * width) / rules.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif steps * rows * columns * factor**2 < rules.min_pixels:
            stretch = math.sqrt(rules.min_pixels / (num_frames * height * width))
            rows, columns = math.ceil(height * stretch / factor), math.ceil(width * stretch / factor)
        return rows * factor, columns * factor
