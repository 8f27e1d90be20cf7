"""Towers of any family, by the model's own code: once an image or a clip of sound. Engine thread only.

What the processor makes of an image in the prompt may have tokens that are no placeholders between those that are: ends
of rows, names of tiles. Their embeddings are kept with the image's, so that what is kept covers its place in the prompt
without a gap.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.media import MediaUnit, PromptMedia, split_media
from ftserve.engine.runner import is_out_of_memory
from ftserve.engine.transfer import upload
from ftserve.engine.types import GenerationRequest, MediaItem

log = logging.getLogger("ftserve.engine")

Compute = Callable[[Mapping[str, Tensor]], Tensor]  # an item's features by name to its embeddings [n, width]


class FeatureTower:
    """Encodes images or sound, and keeps their embeddings until it is told to drop them."""

    def __init__(self, model: PreTrainedModel, placeholder: int, compute: Compute, *, max_bytes: int) -> None:
        """Take the tower of `model`, which `compute` runs; `max_bytes` are for embeddings.

        Raises:
            ValueError: nothing fits.
        """
        self._embed: Any = model.get_input_embeddings()
        self._device, self._dtype = model.device, model.dtype
        self._placeholder = placeholder
        self._compute = compute
        self._kept: dict[bytes, Tensor] = {}  # name: [1, tokens, width]
        token_bytes = model.config.get_text_config().hidden_size * self._dtype.itemsize
        self.capacity = max_bytes // token_bytes  # tokens
        if self.capacity < 1:
            raise ValueError(f"--encoder-cache-gb: {max_bytes} bytes are less than a token's {token_bytes}")

    def prepare(self, request: GenerationRequest) -> PromptMedia:
        """Check the request's media and say where they are in the prompt.

        Raises:
            InvalidRequestError: they do not fit the model, or one does not fit the memory for embeddings.
        """
        end = 0
        for span in request.media:
            start, end_before = span.offset, end
            end = start + span.num_tokens
            shown = tuple(request.prompt_ids[start:end])
            if start < end_before or shown != self._shown(span.item) or self._placeholder not in shown:
                raise InvalidRequestError("The prompt has no placeholders where its media are.", param="messages")
            if span.item.features == () or span.num_tokens > self.capacity:
                raise InvalidRequestError(
                    f"An item of {span.num_tokens} tokens does not fit: the engine holds {self.capacity}.",
                    param="messages",
                )
        return PromptMedia(split_media(request))

    def encode(self, units: Sequence[MediaUnit]) -> None:
        """Compute and keep the embeddings of `units`, one after the other: their inputs differ in shape."""
        for unit in units:
            self._kept[unit.name] = self._encode(unit.item)

    @torch.inference_mode()
    def _encode(self, item: MediaItem) -> Tensor:
        """Return [1, tokens, width]; numbers that are none if the tower fails, or gives another number of them."""
        ids = np.array(self._shown(item), np.int64)
        embeddings = self._embed(upload(ids, self._device))
        places = np.flatnonzero(ids == self._placeholder)
        rows = self._rows(item)
        if rows is None or len(places) != len(rows):
            log.error("the tower does not give the %d embeddings of this %s", len(places), item.modality.value)
            return torch.full_like(embeddings, torch.nan)[None]  # ends the request, and no other
        whole: Tensor = embeddings.index_copy(0, upload(places, self._device), rows.to(embeddings.dtype))[None]
        return whole

    def _rows(self, item: MediaItem) -> Tensor | None:
        """Return what the tower makes of an item; None if it fails on it, which is no reason for others to suffer."""
        try:
            return self._compute({name: self._upload(values) for name, values in item.features})
        except Exception as exc:
            if isinstance(exc, MemoryError) or (isinstance(exc, RuntimeError) and is_out_of_memory(exc)):
                raise  # which has remedies
            log.exception("the tower fails on an item of %d tokens", item.num_tokens)
            return None

    def _upload(self, values: np.ndarray) -> Tensor:
        tensor = upload(np.ascontiguousarray(values), self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def drop(self, names: Sequence[bytes]) -> None:
        """Forget embeddings."""
        for name in names:
            self._kept.pop(name, None)

    def embeddings(self, unit: MediaUnit) -> Tensor:
        """Return [1, tokens, width] of a unit that was encoded."""
        return self._kept[unit.name]

    def _shown(self, item: MediaItem) -> tuple[int, ...]:
        """Return the ids of the prompt from the item's first placeholder to its last."""
        shown = tuple(item.replacement[item.lead : item.lead + item.num_tokens])
        return shown or (self._placeholder,) * item.num_tokens


def image_features(model: PreTrainedModel) -> Compute:
    """Return what runs the vision tower of a model that has `get_image_features`."""
    run: Any = model.model.get_image_features
    names = inspect.signature(run).parameters.keys()

    def compute(features: Mapping[str, Tensor]) -> Tensor:
        output = run(**{name: values for name, values in features.items() if name in names}).pooler_output
        parts = [output] if isinstance(output, Tensor) else output
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    return compute
