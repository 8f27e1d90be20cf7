"""The engine over a transformers model. Engine thread only."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ftserve.engine import loader, packed
from ftserve.engine.batcher import ContinuousBatcher
from ftserve.engine.blocks import BLOCK_SIZE, BlockPool
from ftserve.engine.capacity import cache_bytes, count_blocks
from ftserve.engine.checkpoint import Checkpoint
from ftserve.engine.config import EngineConfig
from ftserve.engine.kernels import choose_decode_kernel
from ftserve.engine.kv_cache import KVCache
from ftserve.engine.sampler import Sampler, TokenReading
from ftserve.engine.scheduler import Scheduler
from ftserve.engine.vision_runner import make_encoder_cache, make_runner, make_tower


class TorchStepper(ContinuousBatcher[Tensor, TokenReading]):
    """The stepper that serves a checkpoint. Loading takes seconds to minutes; use it on the thread that made it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Load the model and take the memory for its cache.

        Raises:
            UnsupportedModelError: the engine cannot run this model.
            ValueError: the configuration does not fit it.
        """
        torch.set_num_threads(config.torch_threads or default_threads())
        self._device = loader.choose_device(config.device)
        self._dtype = loader.choose_dtype(config.dtype, checkpoint.path, self._device)
        inputs = checkpoint.media_inputs
        model = loader.load_model(checkpoint.path, device=self._device, dtype=self._dtype, has_tower=inputs is not None)
        tower = None if inputs is None else make_tower(model, inputs, max_bytes=int(config.encoder_cache_gb * 1e9))
        if packed.can_pack(self._device, self._dtype):
            packed.pack_linears(model)
        shapes = loader.probe_layers(model)
        max_model_len = config.resolve(model_max_len=checkpoint.model_max_len).max_model_len
        assert max_model_len is not None
        num_blocks = count_blocks(shapes, self._dtype, cache_bytes(config, model), max_model_len=max_model_len)
        cache = KVCache(shapes, num_blocks, BLOCK_SIZE, dtype=self._dtype, device=self._device)
        runner = make_runner(
            model,
            tower,
            cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            kernel=choose_decode_kernel(self._device, self._dtype, shapes),
        )
        if self._device.type == "cuda" and config.cuda_graphs and tower is None:
            runner.use_graphs()
        super().__init__(
            Scheduler(
                BlockPool(num_blocks, BLOCK_SIZE),
                max_num_seqs=config.max_num_seqs,
                max_prefill_tokens=config.max_num_batched_tokens,
                encoder=make_encoder_cache(tower, config.max_num_batched_tokens),
            ),
            runner,
            Sampler(checkpoint.vocab_size, self._device),
            vocab_size=checkpoint.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            media=tower,
            is_asynchronous=config.async_scheduling and self._device.type != "cpu",
        )

    def describe(self) -> dict[str, str]:
        return super().describe() | {"device": str(self._device), "dtype": str(self._dtype).removeprefix("torch.")}


def default_threads() -> int:
    """Return how many threads the model's operators use: the CPUs that we may use, but one for the front end.

    OpenMP threads wait for each other hundreds of times a step. One that shares its core with other work makes all
    wait: on two cores with another busy process, a step took 37 ms with one thread and over 300 ms with two.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)
