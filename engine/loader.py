"""Load a language model of transformers so that its attention is ours, and learn what it stores per token."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from ftserve.engine import attention
from ftserve.engine.kv_cache import LayerShape


class UnsupportedModelError(ValueError):
    """The model cannot run on this engine. The message is for the operator."""


_PROBE = "ftserve_probe"

# transformers changes what the whole process shares while it loads (default dtype, initializers, its registry of
# attention functions), so engines load one after the other, and none steps before all are loaded.
LOADING = threading.Lock()


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


def load_model(path: Path, *, device: torch.device, dtype: torch.dtype, has_tower: bool = False) -> PreTrainedModel:
    """Load the model in `path` for inference; `has_tower` tells that it sees or hears.

    Raises:
        UnsupportedModelError: transformers does not know it as such a model, or cannot load it.
    """
    attention.register()
    transformers_logging.disable_progress_bar()  # once, at start: the log has its own line
    kind: Any = AutoModelForMultimodalLM if has_tower else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention_of_parts() if has_tower else attention.IMPLEMENTATION,
            local_files_only=True,
        )
    except (ValueError, KeyError, ImportError) as exc:
        raise UnsupportedModelError(f"{path}: transformers cannot load this model for the engine: {exc}") from exc
    return prepare_model(model, device)


def attention_of_parts() -> dict[str, str]:
    """Return which attention the parts of a model that sees or hears are to use."""
    return {"text_config": attention.IMPLEMENTATION, "vision_config": "sdpa", "audio_config": "sdpa"}


def prepare_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Make a model ready for `run` on `device`.

    Raises:
        UnsupportedModelError: its forward cannot pick the rows that need logits, or its positions depend on how long
            the longest sequence of a batch is.
    """
    if unsteady := _rope_types(model) & {"dynamic", "longrope"}:
        raise UnsupportedModelError(
            f"{type(model).__name__}: rope type {unsteady.pop()} turns all keys when one sequence of the batch grows "
            "long, so what is cached would be wrong; such models are not served"
        )
    if not _has_tower(model) and "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{type(model).__name__} does not take logits_to_keep")
    return model.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return,arg-type]


def _has_tower(model: PreTrainedModel) -> bool:
    """Tell whether the model sees or hears; its text layers and head are then run one after the other."""
    return "text_config" in model.config.sub_configs


def _rope_types(model: PreTrainedModel) -> set[str]:
    """Return how the layers turn positions into rotations; some models have several kinds of layers."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(kind["rope_type"]) for kind in kinds if "rope_type" in kind}


def see_nothing(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Attend to no token at all."""
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


@contextlib.contextmanager
def attending_by(model: PreTrainedModel, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Have the model's layers call `attend` instead of our attention. While loading only: see `LOADING`."""
    AttentionInterface.register(_PROBE, attend)
    _set_text_attention(model, _PROBE)
    try:
        yield
    finally:
        _set_text_attention(model, attention.IMPLEMENTATION)


def _set_text_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the layers that speak; a tower keeps its own."""
    model.set_attn_implementation({"text_config": name} if _has_tower(model) else name)


def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Return what each attention layer stores of a token, by running the model with attention that sees nothing.

    Raises:
        UnsupportedModelError: some layer keeps a state that is not keys and values in the attention interface.
    """
    found: dict[int, LayerShape] = {}
    reached: set[int] = set()

    def record(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        found[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        if "paged" in options:
            reached.add(layer)
        return see_nothing(module, query, key, value)

    with attending_by(model, record):
        one, other = (_logits_after(model, earlier) for earlier in (2, 3))
    name = type(model).__name__
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name}: {len(found)} of {layers} layers use transformers' attention interface; models with layers of "
            "another kind (state space, linear attention, own attention code) are not served"
        )
    if len(reached) != layers:
        raise UnsupportedModelError(f"{name} does not hand keywords on to its attention interface")
    # Rounding may differ, because experts get other rows; a state makes far more of a difference.
    if float((one - other).abs().max()) > 8 * torch.finfo(one.dtype).eps * float(one.abs().max()):
        raise UnsupportedModelError(
            f"{name}: tokens see each other by other means than transformers' attention interface"
        )
    return [found[layer] for layer in range(layers)]


@torch.inference_mode()
def _logits_after(model: PreTrainedModel, earlier: int) -> Tensor:
    """Return the logits of token 1 after two others that begin with `earlier`."""
    ids = torch.tensor([[earlier, earlier + 1, 1]], device=model.device)
    positions = torch.tensor([[0, 1, 2]], device=model.device)
    output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, paged=None)
    logits: Tensor = output.logits[:, -1:]  # some families make all
    return logits
