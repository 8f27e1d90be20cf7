"""Load a causal language model of transformers so that its attention is ours, and learn what it stores per token."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ftserve.engine import attention
from ftserve.engine.kv_cache import LayerShape


class UnsupportedModelError(ValueError):
    """The model cannot run on this engine. The message is for the operator."""


_PROBE = "ftserve_probe"


def choose_device(wanted: str) -> torch.device:
    """Return the device that `EngineConfig.device` means."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def choose_dtype(wanted: str, path: Path, device: torch.device) -> torch.dtype:
    """Return the type that `EngineConfig.dtype` means; "auto" is the checkpoint's own.

    CPUs compute float16 slowly, so there "auto" turns it into bfloat16.
    """
    if wanted != "auto":
        dtype = getattr(torch, wanted)
    else:
        config = AutoConfig.from_pretrained(path)
        dtype = getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
        if dtype == torch.float16 and device.type == "cpu":
            dtype = torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_model(path: Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model in `path` for inference.

    Raises:
        UnsupportedModelError: transformers does not know it as a causal language model, or cannot load it.
    """
    attention.register()
    transformers_logging.disable_progress_bar()  # once, at start: the log has its own line
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.IMPLEMENTATION, local_files_only=True
        )
    except (ValueError, KeyError, ImportError) as exc:
        raise UnsupportedModelError(f"{path}: transformers cannot load this model for the engine: {exc}") from exc
    return prepare_model(model, device)


def prepare_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Make a model ready for `run` on `device`.

    Raises:
        UnsupportedModelError: its forward cannot pick the rows that need logits.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{type(model).__name__} does not take logits_to_keep")
    return model.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return,arg-type]


def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Run one token through the model and return what each attention layer wants to store.

    Raises:
        UnsupportedModelError: some layer keeps a state that is not keys and values in the attention interface.
    """
    found: dict[int, LayerShape] = {}

    def record(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        found[int(module.layer_idx)] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])  # type: ignore[arg-type]
        return query.new_zeros(1, 1, query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_PROBE, record)
    model.set_attn_implementation(_PROBE)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False)
    finally:
        model.set_attn_implementation(attention.IMPLEMENTATION)
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: {len(found)} of {layers} layers use transformers' attention interface; "
            "models with layers of another kind (state space, linear attention, own attention code) are not served"
        )
    return [found[layer] for layer in range(layers)]
