"""Run a model that sees or hears over the flat batch of a step. Engine thread only.

What its tower made of an image or of sound takes the place of the placeholders' embeddings, as far as they are in the
step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ftserve.engine.checkpoint import FEATURE_FAMILIES, PATCH_FAMILIES, AudioInputs, VisionInputs
from ftserve.engine.encoder_cache import EncoderCache
from ftserve.engine.features import FeatureTower, image_features
from ftserve.engine.hearing import audio_features
from ftserve.engine.kernels import DecodeKernel
from ftserve.engine.kv_cache import KVCache
from ftserve.engine.loader import UnsupportedModelError
from ftserve.engine.runner import ModelRunner
from ftserve.engine.sampler import TokenReading
from ftserve.engine.scheduler import StepPlan
from ftserve.engine.vision import VisionTower

Tower = VisionTower | FeatureTower


class VisionModelRunner(ModelRunner):
    """A `ModelRunner` that sees or hears."""

    def __init__(
        self,
        model: PreTrainedModel,
        tower: Tower,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        kernel: DecodeKernel | None = None,
    ) -> None:
        super().__init__(model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, kernel=kernel)
        self._tower = tower
        self._text: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()

    def run(self, plan: StepPlan, unread: TokenReading | None) -> Tensor:
        self._tower.drop(plan.drops)
        try:
            return super().run(plan, unread)
        except MemoryError:
            self._tower.drop([unit.name for unit in plan.encodes])  # as the books do
            raise

    def _compute(self, plan: StepPlan, token_ids: Tensor, positions: np.ndarray) -> Tensor:
        self._tower.encode(plan.encodes)
        embeds = self._text.embed_tokens(token_ids)
        hidden = self._text(
            inputs_embeds=embeds[None],
            position_ids=self._upload(_rope_positions(plan, positions)),
            use_cache=False,
            paged=self._paged_batch(plan, positions),
            **self._merge(plan, embeds),
        ).last_hidden_state
        logits: Tensor = self._head(hidden[0, self._upload(self._rows_to_keep(plan))])
        return logits

    def _merge(self, plan: StepPlan, embeds: Tensor) -> dict[str, Any]:
        """Write what the tower made of media over their placeholders in `embeds` [T, width].

        Returns:
            What the text model adds to the same tokens after its first layers, as keywords for it; often nothing.
        """
        seen, parts, row = [], [], len(plan.decodes)
        for sequence, count in plan.prefills:
            start, end = sequence.num_computed, sequence.num_computed + count
            for unit in sequence.units_between(start, end):
                first, last = max(unit.start, start), min(unit.end, end)
                part = self._tower.embeddings(unit)[:, first - unit.start : last - unit.start]
                rows = slice(row + first - start, row + last - start)
                embeds[rows] = part[0]
                seen.append(rows)
                parts.append(part[1:])
            row += count
        if not parts or not parts[0].shape[0]:
            return {}
        mask = torch.zeros(1, len(embeds), dtype=torch.bool)
        for rows in seen:
            mask[0, rows] = True
        return {
            "visual_pos_masks": mask.to(embeds.device),
            "deepstack_visual_embeds": list(torch.cat(parts, dim=1)),
        }


def _rope_positions(plan: StepPlan, positions: np.ndarray) -> np.ndarray:
    """Return positions in time, height and width [3, 1, T]; where all are indices [1, T], which means the same."""
    sequences = [*plan.decodes, *(sequence for sequence, _ in plan.prefills)]
    if all(sequence.media is None or sequence.media.positions is None for sequence in sequences):
        return positions[None]
    axes = np.tile(positions, (3, 1))
    num_decodes = len(plan.decodes)
    deltas = [sequence.media.position_delta if sequence.media else 0 for sequence in plan.decodes]
    axes[:, :num_decodes] += np.array(deltas, np.int64)
    row = num_decodes
    for sequence, count in plan.prefills:
        media, start = sequence.media, sequence.num_computed
        if media is not None and media.positions is not None:
            of_prompt = media.positions[:, start : start + count]
            known = of_prompt.shape[1]
            axes[:, row : row + known] = of_prompt
            axes[:, row + known : row + count] += media.position_delta
        row += count
    return axes[:, None]


def make_tower(model: PreTrainedModel, inputs: VisionInputs | AudioInputs, *, max_bytes: int) -> Tower:
    """Return what encodes media for `model`, and keeps `max_bytes` of embeddings.

    Raises:
        UnsupportedModelError: it is of a family that is not served.
        ValueError: nothing fits into `max_bytes`.
    """
    family = model.config.model_type
    if isinstance(inputs, AudioInputs):
        return FeatureTower(model, inputs.audio_token_id, audio_features(model), max_bytes=max_bytes)
    if family in PATCH_FAMILIES:
        return VisionTower(model, inputs, max_bytes=max_bytes)
    if family in FEATURE_FAMILIES:
        return FeatureTower(model, inputs.image_token_id, image_features(model), max_bytes=max_bytes)
    known = ", ".join(sorted(PATCH_FAMILIES | FEATURE_FAMILIES))
    raise UnsupportedModelError(f"{type(model).__name__}: of vision-language models, {known} are served")


def make_runner(model: PreTrainedModel, tower: Tower | None, cache: KVCache, **options: Any) -> ModelRunner:
    """Return the runner of a model with a tower or without."""
    return ModelRunner(model, cache, **options) if tower is None else VisionModelRunner(model, tower, cache, **options)


def make_encoder_cache(tower: Tower | None, max_tokens_per_step: int) -> EncoderCache | None:
    """Return the books of what `tower` keeps."""
    return None if tower is None else EncoderCache(tower.capacity, max_tokens_per_step=max_tokens_per_step)
