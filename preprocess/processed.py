"""Images by a model's own transformers processor, for every family whose patches we do not cut ourselves.

Processors keep no state between calls, but their tokenizers do, so each thread has a processor of its own.

Shared fields: the thread-local slot alone; a processor never leaves its thread.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import Feature, MediaItem, Modality
from ftserve.preprocess.formats import ImageLimits, open_image
from ftserve.preprocess.images import decode
from ftserve.preprocess.pixels import upright
from ftserve.preprocess.sources import MediaSource, Payload
from ftserve.preprocess.tokens import ID_TYPECODE

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

log = logging.getLogger("ftserve.preprocess")

_NO_FEATURES = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class ProcessedMedia:
    """The images of one model, behind the intake's interface."""

    def __init__(self, directory: Path, placeholder_id: int, limits: ImageLimits, *, min_tokens: int = 1) -> None:
        """Load the processor in `directory` for this thread, to see that it works.

        `min_tokens` is the least that an image must have placeholders.

        Raises:
            ValueError: it cannot be loaded, or does not make of an image what the engine takes.
        """
        self.max_bytes = limits.max_bytes
        self._directory = directory
        self._placeholder_id = placeholder_id
        self._min_tokens = min_tokens
        self._limits = limits
        self._own = threading.local()
        self._mark: str = self._processor().image_token
        self.marks: Mapping[Modality, int] = {Modality.IMAGE: self._processor().image_token_id}

    def options(self, source: MediaSource) -> bytes:
        """Return all that decides what an image becomes, beside its bytes: nothing that a request may choose."""
        if source.options:
            raise InvalidRequestError("This model's images take no options.", param="mm_processor_kwargs")
        return b"processed"

    def open(self, payload: Payload, _source: MediaSource) -> OpenedPicture:
        return OpenedPicture(open_image(payload[0], self._limits), self)

    def process(self, image: Any, key: bytes) -> MediaItem:
        """Return what the processor makes of a picture in mode RGB. Any thread.

        Raises:
            InvalidRequestError: it makes nothing of this one.
        """
        try:
            made = self._processor()(images=[image], text=self._mark, add_special_tokens=False, return_tensors="np")
        except (ValueError, ArithmeticError) as exc:  # of one so narrow, for example, that no column of it is left
            log.warning("the processor makes nothing of an image of %dx%d: %s", image.width, image.height, exc)
            raise _misfit(image) from exc
        ids = made["input_ids"][0]
        places = np.flatnonzero(ids == self._placeholder_id)
        if len(places) < self._min_tokens:
            raise _misfit(image)
        first, last = int(places[0]), int(places[-1])
        return MediaItem(
            modality=Modality.IMAGE,
            num_tokens=last - first + 1,
            digest=key,
            features=tuple(Feature(name, made[name]) for name in sorted(made.keys() - _NO_FEATURES)),
            replacement=array(ID_TYPECODE, ids.tolist()),
            lead=first,
        )

    def _processor(self) -> Any:
        """Return this thread's processor."""
        found = getattr(self._own, "processor", None)
        if found is None:
            found = self._own.processor = _load(self._directory)
        return found


def _misfit(image: Any) -> InvalidRequestError:
    return InvalidRequestError(f"The model takes no image of {image.width}x{image.height} pixels.")


class OpenedPicture:
    """An image whose header has been read."""

    def __init__(self, image: ImageFile, media: ProcessedMedia) -> None:
        self._image = image
        self._media = media

    @property
    def pixels(self) -> int:
        return self._image.width * self._image.height

    def decode(self, key: bytes, _is_wanted: Callable[[], bool]) -> MediaItem:
        # As `transformers.image_utils.load_image` hands pictures to processors.
        picture = upright(decode(self._image, lambda loaded: loaded.convert("RGB")), self._image)
        return self._media.process(picture, key)


_LOADING = threading.Lock()  # transformers' import and registries are not made for several threads


def _load(directory: Path) -> Any:
    """Return the processor in a model's directory, with the backend that needs no torchvision.

    Raises:
        ValueError: there is none, or it cannot be loaded.
    """
    with _LOADING:
        from transformers import AutoImageProcessor, AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
            images = AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError, TypeError) as exc:
            raise ValueError(f"{directory}: its processor cannot be loaded: {exc}") from exc
    processor.image_processor = images
    return processor
