"""The audio tower of Qwen2-Audio: a spectrum to embeddings. Engine thread only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from ftserve.engine.features import Compute


def audio_features(model: PreTrainedModel) -> Compute:
    """Return what runs the tower and the projector of a model, which has no function of its own for both."""
    tower: Any = model.model.audio_tower
    project: Any = model.model.multi_modal_projector

    def compute(features: Mapping[str, Tensor]) -> Tensor:
        """Take [1, mel bins, frames], and which frames are sound [1, frames]; the others are silence behind it."""
        spectrum, num_frames = features["input_features"], int(features["feature_attention_mask"].sum())
        places = torch.arange((spectrum.shape[-1] + 1) // 2, device=spectrum.device)  # the second convolution's stride
        num_places = (num_frames + 1) // 2
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=spectrum.new_zeros(1, len(places), 1),
            attention_mask=(places < num_places).long()[None],
        )
        hidden = tower(spectrum, attention_mask=mask).last_hidden_state
        embeddings: Tensor = project(hidden[0, : num_places // 2])  # two are pooled into one
        return embeddings

    return compute
