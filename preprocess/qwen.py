"""What the Qwen-VL family makes of images: the fast path of `images.py` behind the intake's interface."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.formats import ImageLimits, open_image
from ftserve.preprocess.images import PatchRules, image_item
from ftserve.preprocess.sources import MediaSource, Payload

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image whose header has been read."""

    image: ImageFile
    rules: PatchRules

    @property
    def pixels(self) -> int:
        return self.image.width * self.image.height

    def decode(self, key: bytes) -> MediaItem:
        return image_item(self.image, self.rules, key)


class QwenMedia:
    """Immutable; shared by all threads."""

    def __init__(self, images: PatchRules, limits: ImageLimits) -> None:
        self.max_bytes = limits.max_bytes
        self._images = images
        self._limits = limits

    @classmethod
    def read(cls, directory: Path, limits: ImageLimits) -> QwenMedia:
        """Read the rules from a model's directory.

        Raises:
            ValueError: its processor is configured in a way that we do not reproduce.
        """
        return cls(PatchRules.read(directory), limits)

    def options(self, source: MediaSource) -> bytes:
        return f"{source.modality.value} {self._rules(source)!r}".encode()

    def open(self, payload: Payload, source: MediaSource) -> OpenedImage:
        if source.modality is not Modality.IMAGE:
            raise InvalidRequestError("This server takes no videos yet.")
        image = open_image(payload[0], self._limits)
        rules = self._rules(source)
        rules.fit(image.height, image.width)
        return OpenedImage(image, rules)

    def _rules(self, source: MediaSource) -> PatchRules:
        own = self._images
        asked = dict(source.options)
        lowest = int(asked.get("min_pixels", min(own.min_pixels, asked.get("max_pixels", own.min_pixels))))
        highest = int(asked.get("max_pixels", max(own.max_pixels, lowest)))
        if not own.factor**2 <= lowest <= highest <= own.max_pixels:
            raise InvalidRequestError(
                f"This model takes images of {own.factor**2} to {own.max_pixels} pixels, "
                "and 'min_pixels' must not exceed 'max_pixels'.",
                param="mm_processor_kwargs",
            )
        return own if not asked else replace(own, min_pixels=lowest, max_pixels=highest)
