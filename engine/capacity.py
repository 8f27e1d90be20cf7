"""How much memory the KV cache takes: what the operator says, or what a device has left."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ftserve.engine import loader
from ftserve.engine.blocks import BLOCK_SIZE
from ftserve.engine.config import EngineConfig
from ftserve.engine.kv_cache import LayerShape

log = logging.getLogger("ftserve.engine")

DEFAULT_CPU_GB = 2.0  # taken from RAM only as it is written


def cache_bytes(config: EngineConfig, model: PreTrainedModel) -> int:
    """Return how many bytes the cache may take on the model's device, which holds the model already.

    On CUDA that is `gpu_memory_utilization` of the whole memory, less what is in use, and less what the largest step
    takes for itself. One engine a device: it does not see what another process will take later.
    """
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 1e9)
    if model.device.type != "cuda":
        return int(DEFAULT_CPU_GB * 1e9)
    step = _step_bytes(model, config.max_num_batched_tokens + config.max_num_seqs, config.max_num_seqs)
    free, total = torch.cuda.mem_get_info(model.device)
    embeddings = config.encoder_cache_gb * 1e9 if "vision_config" in model.config.sub_configs else 0.0
    return int(free - (1.0 - config.gpu_memory_utilization) * total - step - embeddings)


def _step_bytes(model: PreTrainedModel, num_tokens: int, num_rows: int) -> int:
    """Return what a step of so many tokens, with logits of so many rows, takes for itself on a CUDA device."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    run_step(model, num_tokens, num_rows)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def run_step(model: PreTrainedModel, num_tokens: int, num_rows: int) -> Tensor:
    """Return float32 logits [num_rows, vocabulary] of a step without attention, which takes little beside the rest."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
    positions = torch.arange(num_tokens, device=model.device)[None]
    rows = torch.arange(min(num_rows, num_tokens), device=model.device)
    with loader.attending_by(model, loader.see_nothing):
        output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows, paged=None)
    logits: Tensor = output.logits[0].float()
    return logits


def count_blocks(shapes: list[LayerShape], dtype: torch.dtype, num_bytes: int, *, max_model_len: int) -> int:
    """Return how many blocks fit into `num_bytes`; a cache smaller than the model's context is said at start.

    Raises:
        ValueError: not even one.
    """
    block_bytes = BLOCK_SIZE * sum(shape.num_elements for shape in shapes) * dtype.itemsize
    count = num_bytes // block_bytes - 1  # one is the null block
    if count < 1:
        raise ValueError(
            f"{max(0, num_bytes) / 1e9:.3g} GB for the KV cache are less than two blocks of {block_bytes} bytes; "
            "see --kv-cache-gb and --gpu-memory-utilization"
        )
    if count * BLOCK_SIZE < max_model_len:
        log.warning(
            "the KV cache holds %d tokens, less than the context of %d: requests that need more are refused",
            count * BLOCK_SIZE,
            max_model_len,
        )
    return count
