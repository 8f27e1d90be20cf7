"""The vision tower of a model of the Qwen-VL family: patches to embeddings, once an image. Engine thread only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ftserve.engine.checkpoint import Normalization, VisionInputs
from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.media import MediaUnit, PromptMedia, split_media
from ftserve.engine.types import GenerationRequest, MediaItem, MediaSpan, Modality

_MISFIT = "An image or clip does not fit this model's vision tower."


class VisionTower:
    """Encodes units, and keeps their embeddings until it is told to drop them."""

    def __init__(self, model: PreTrainedModel, inputs: VisionInputs, *, max_bytes: int) -> None:
        """Take the tower of `model`, and run it once to see how many tokens fit into `max_bytes`.

        Raises:
            ValueError: nothing fits.
        """
        self._model = model.model
        self._tower = model.model.visual
        self._device, self._dtype = model.device, model.dtype
        self._tokens = {Modality.IMAGE: inputs.image_token_id, Modality.VIDEO: inputs.video_token_id}
        config = model.config.vision_config
        self._merge = int(config.spatial_merge_size)
        self._plane = int(config.temporal_patch_size) * int(config.patch_size) ** 2  # values of a channel in a patch
        self._row_len = int(config.in_channels) * self._plane
        self._scales = {
            Modality.IMAGE: self._scale(inputs.image),
            Modality.VIDEO: self._scale(inputs.video),
        }
        self._kept: dict[bytes, Tensor] = {}  # name: [levels, tokens, width]
        probe = self._encode(torch.zeros(self._merge**2, self._row_len), [(1, self._merge, self._merge)])[0]
        self.capacity = max_bytes // probe.nbytes  # tokens
        if self.capacity < 1:
            raise ValueError(f"--encoder-cache-gb: {max_bytes} bytes are less than a token's {probe.nbytes}")

    def _scale(self, normalization: Normalization) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of each value of a patch, float32 [row length] each, in units of pixels."""
        mean, std = (
            (torch.tensor(values, dtype=torch.float32) * 255).repeat_interleave(self._plane).to(self._device)
            for values in (normalization.mean, normalization.std)
        )
        return mean, std

    def prepare(self, request: GenerationRequest) -> PromptMedia:
        """Check the request's media, split them and say where each token of the prompt lies.

        Raises:
            InvalidRequestError: they do not fit the model, or an image does not fit the memory for embeddings.
        """
        ids = np.asarray(request.prompt_ids, np.int64)
        end = 0
        for span in request.media:
            self._check(span.item)
            start, end_before = span.offset, end
            end = start + span.num_tokens
            if start < end_before or end > len(ids) or (ids[start:end] != self._tokens[span.item.modality]).any():
                raise InvalidRequestError("The prompt has no placeholders where its images are.", param="messages")
        units = split_media(request)
        largest = max(unit.num_tokens for unit in units)
        if largest > self.capacity:
            raise InvalidRequestError(
                f"An image of {largest} tokens is too large: the engine holds {self.capacity}.", param="messages"
            )
        positions, delta = self._positions(ids, request.media)
        return PromptMedia(units, positions, delta)

    def _check(self, item: MediaItem) -> None:
        patches = item.patches
        t, height, width = item.grid
        fits = (
            patches is not None
            and patches.dtype == np.uint8
            and patches.shape == (t * height * width, self._row_len)
            and min(item.grid) > 0
            and height % self._merge == width % self._merge == 0
            and item.num_tokens == t * height * width // self._merge**2
            and (item.modality is Modality.VIDEO or t == 1)
        )
        if not fits:
            raise InvalidRequestError(_MISFIT, param="messages")

    def _positions(self, ids: NDArray[np.int64], media: Sequence[MediaSpan]) -> tuple[NDArray[np.int64], int]:
        """Return positions [3, len(ids)] in time, height and width, and what later ones are more than their index.

        The model's own function computes them: families and releases of transformers differ in detail. What is
        generated goes on as text behind the prompt would, so one token more is asked for; the offset that the function
        returns is another one after clips that last longer than their frames are wide.
        """
        length = len(ids)
        ids = np.append(ids, 0)
        kinds = torch.zeros(1, length + 1, dtype=torch.int32)
        grids: dict[Modality, list[tuple[int, int, int]]] = {Modality.IMAGE: [], Modality.VIDEO: []}
        seconds, end = [], 0
        for span in media:
            item, modality = span.item, span.item.modality
            if span.offset == end > 0:
                raise InvalidRequestError("This model needs a token between two images.", param="messages")
            end = span.offset + span.num_tokens
            kinds[0, span.offset : end] = 1 if modality is Modality.IMAGE else 2
            t, height, width = item.grid
            grids[modality].append((t if span.step is None else 1, height, width))
            if modality is Modality.VIDEO:
                seconds.append(1.0 if item.second_per_grid is None else item.second_per_grid)
        positions, _ = self._model.get_rope_index(
            torch.from_numpy(ids)[None],
            mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor(grids[Modality.IMAGE]) if grids[Modality.IMAGE] else None,
            video_grid_thw=torch.tensor(grids[Modality.VIDEO]) if grids[Modality.VIDEO] else None,
            second_per_grid_ts=torch.tensor(seconds) if seconds else None,
        )
        axes: NDArray[np.int64] = positions[:, 0].numpy()
        return axes[:, :length], int(axes[0, length]) - length

    def encode(self, units: Sequence[MediaUnit]) -> None:
        """Compute and keep the embeddings of `units`, in one run of the tower."""
        if not units:
            return
        rows = torch.cat([self._normalized(unit) for unit in units])
        encoded = self._encode(rows, [(1, *unit.item.grid[1:]) for unit in units])
        for unit, embeddings in zip(units, encoded, strict=True):
            self._kept[unit.name] = embeddings

    def _normalized(self, unit: MediaUnit) -> Tensor:
        """Return the unit's patches as its processor's `pixel_values`, float32, on the device."""
        count = math.prod(unit.item.grid[1:])
        patches = torch.from_numpy(unit.item.own_patches[unit.step * count : (unit.step + 1) * count])
        mean, std = self._scales[unit.item.modality]
        return (patches.to(self._device, non_blocking=True) - mean) / std

    @torch.inference_mode()
    def _encode(self, rows: Tensor, grids: list[tuple[int, int, int]]) -> list[Tensor]:
        """Return [levels, tokens, width] for each grid."""
        output = self._tower(rows.to(self._device, self._dtype), grid_thw=torch.tensor(grids, device=self._device))
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        counts = [math.prod(grid) // self._merge**2 for grid in grids]
        return [part.clone() for part in torch.stack(levels).split(counts, dim=1)]

    def drop(self, names: Sequence[bytes]) -> None:
        """Forget embeddings."""
        for name in names:
            self._kept.pop(name, None)

    def embeddings(self, unit: MediaUnit) -> Tensor:
        """Return [levels, tokens, width] of a unit that was encoded."""
        return self._kept[unit.name]
