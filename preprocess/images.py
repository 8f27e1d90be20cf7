"""Compressed images to the uint8 patches of the Qwen-VL family (Qwen2-VL, 2.5-VL, 3-VL).

The result is what transformers' `Qwen2VLImageProcessor` makes, short of its normalization, which costs a quarter of the
bytes and belongs on the device: the same grid, and pixels that differ by rounding at most.

JPEG draft mode (decoding at a half or a quarter of the size) is left out on purpose. Where the draft was twice the
target's size, 16 % of the values of a picture with text were off by more than 2 of 255, and 0.7 % where it was four
times; only smooth pictures stayed in tolerance, and one cannot tell before decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.pixels import as_array, flatten, oriented

if TYPE_CHECKING:
    from PIL.Image import Image

U8 = NDArray[np.uint8]

MAX_ASPECT_RATIO = 200  # Qwen's own limit
_BICUBIC = 3  # `PIL.Image.Resampling`


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRules:
    """How pictures are sized, cut and normalized, as the model's processor configuration says."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def read(cls, directory: Path) -> PatchRules:
        """Read the rules for images from a model's directory.

        Raises:
            ValueError: the configuration asks for another resize or is malformed; names the value.
        """
        return cls.from_config(read_processor_config(directory, "image_processor", "preprocessor_config.json"))

    @classmethod
    def from_config(cls, config: dict[str, Any], **defaults: Any) -> PatchRules:
        """Take what `config` says; `defaults` and the class's own values stand in for what it leaves out."""
        if config.get("resample", _BICUBIC) != _BICUBIC:
            raise ValueError(f"processor configuration: resample is {config['resample']!r}, not bicubic ({_BICUBIC})")
        size = config.get("size") or {}
        known = {
            "patch_size": config.get("patch_size"),
            "temporal_patch_size": config.get("temporal_patch_size"),
            "merge_size": config.get("merge_size"),
            "min_pixels": config.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
            "max_pixels": config.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
            "mean": tuple(config["image_mean"]) if config.get("image_mean") else None,
            "std": tuple(config["image_std"]) if config.get("image_std") else None,
        }
        return cls(**{**defaults, **{name: value for name, value in known.items() if value is not None}})

    @property
    def factor(self) -> int:
        """Both edges of a resized picture are multiples of this."""
        return self.patch_size * self.merge_size

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Return the size (height, width) to resize to: Qwen's `smart_resize`, value for value.

        Raises:
            InvalidRequestError: the picture is longer than 200 times its width, or the other way round.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InvalidRequestError(f"An image of {width}x{height} pixels is too narrow for this model.")
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif rows * columns * factor**2 < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * stretch / factor), math.ceil(width * stretch / factor)
        return rows * factor, columns * factor


def read_processor_config(directory: Path, section: str, *files: str) -> dict[str, Any]:
    """Return the part of the model's processor configuration that is about `section`.

    transformers 5 writes one `processor_config.json` with sections; older models have a file for each, and the first
    of `files` that exists counts.
    """
    whole = directory / "processor_config.json"
    if whole.is_file() and isinstance(found := json.loads(whole.read_bytes()).get(section), dict):
        return found
    for name in files:
        if (directory / name).is_file():
            return dict(json.loads((directory / name).read_bytes()))
    return {}


def image_item(image: Image, rules: PatchRules, digest: bytes) -> MediaItem:
    """Decode, resize and cut what `open_image` returned; consumes it.

    Raises:
        InvalidRequestError: the model's processor does not take this shape.
        MediaError: it cannot be decoded.
    """
    patches, grid = image_patches(image, rules)
    return MediaItem(
        modality=Modality.IMAGE,
        patches=patches,
        grid=grid,
        num_tokens=math.prod(grid) // rules.merge_size**2,
        digest=digest,
    )


def image_patches(image: Image, rules: PatchRules) -> tuple[U8, tuple[int, int, int]]:
    """Return uint8 patches `[t * h * w, channels * frames * size * size]` and the grid (t, h, w)."""
    target = rules.fit(image.height, image.width)  # the same for a picture on its side, which is turned afterwards
    frame = oriented(resize(as_array(decode(image)), target), image)
    _, height, width = frame.shape
    grid = (1, height // rules.patch_size, width // rules.patch_size)
    return patchify([frame], rules), grid


def decode(image: Image, convert: Callable[[Image], Image] = flatten) -> Image:
    """Return the picture loaded and converted, by default to RGB or L, transparency over white; not turned upright.

    Raises:
        MediaError: it cannot be decoded.
    """
    size = image.size
    try:
        image.load()
        flat = convert(image)
    except FtserveError:
        raise
    except Exception as exc:  # whatever a decoder makes of bytes that a client chose
        raise MediaError("The image cannot be decoded.") from exc
    if flat.size != size:
        raise MediaError("The image is not of the size that its header says.")
    return flat


def resize(pixels: U8, target: tuple[int, int]) -> U8:
    """Resize `[height, width, channels]` to planes `[3, *target]`, C-contiguous; torch's antialiased bicubic on uint8.

    It is the kernel that torchvision resizes with, so the result equals that of transformers' default backend.
    """
    import torch
    from torch.nn.functional import interpolate

    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if planes.shape[-2:] != target:
        planes = interpolate(planes, target, mode="bicubic", antialias=True)
    planes = planes[0, :3].contiguous()
    return planes.expand(3, -1, -1).numpy()


class PatchWriter:
    """Cuts frames into patches as they come: `[t * h * w, 3 * frames * size * size]` uint8, rows in Qwen's merge order.

    A step of t holds `temporal_patch_size` frames; the last frame stands in for those that are missing at the end.
    """

    def __init__(self, num_frames: int, size: tuple[int, int], rules: PatchRules) -> None:
        """Make room for `num_frames` frames of `size` (height, width)."""
        patch, merge, depth = rules.patch_size, rules.merge_size, rules.temporal_patch_size
        steps, rows, columns = -(-num_frames // depth), size[0] // (patch * merge), size[1] // (patch * merge)
        self.grid = (steps, rows * merge, columns * merge)
        self._out = np.empty((steps, rows, columns, merge, merge, 3, depth, patch * patch), np.uint8)
        self._depth = depth
        self._patch = patch
        self._num_written = 0

    def put(self, frame: U8) -> None:
        """Write the next frame `[3, height, width]`, C-contiguous.

        A row of a patch is copied as one element of that many bytes: copying bytes took four times as long.
        """
        _, rows, columns, merge, *_ = self._out.shape
        step, place = divmod(self._num_written, self._depth)
        lines = frame.view(f"V{self._patch}").reshape(3, rows, merge, self._patch, columns, merge)
        self._out.view(f"V{self._patch}")[step, ..., place, :] = lines.transpose(1, 4, 2, 5, 0, 3)
        self._num_written += 1

    def finish(self) -> U8:
        """Return the patches; at least one frame was put."""
        by_plane = self._out.view(f"V{self._patch**2}")[..., 0]
        step, place = divmod(self._num_written - 1, self._depth)
        for k in range(self._num_written, self.grid[0] * self._depth):
            by_plane[k // self._depth, ..., k % self._depth] = by_plane[step, ..., place]
        return self._out.reshape(math.prod(self.grid), -1)


def patchify(frames: list[U8], rules: PatchRules) -> U8:
    """Cut frames `[3, height, width]` of one size into patches."""
    writer = PatchWriter(len(frames), (frames[0].shape[1], frames[0].shape[2]), rules)
    for frame in frames:
        writer.put(frame)
    return writer.finish()


def normalize(patches: U8, rules: PatchRules) -> NDArray[np.float32]:
    """Return what the processor calls `pixel_values`; the reference for what the engine does on the device."""
    mean = np.asarray(rules.mean, np.float32)[:, None] * np.float32(255)
    std = np.asarray(rules.std, np.float32)[:, None] * np.float32(255)
    planes = patches.reshape(len(patches), len(rules.mean), -1)
    values: NDArray[np.float32] = ((planes - mean) / std).reshape(patches.shape)
    return values
