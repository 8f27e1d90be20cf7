"""The kernels that attend a decoding token to its cache: what they promise, and which one a device gets."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from ftserve.engine.kv_cache import LayerShape

log = logging.getLogger("ftserve.engine")


class DecodeKernel(Protocol):
    """Attention of N tokens, each the last one of its sequence. Engine thread only."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lens: Tensor,
        output: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Store the keys and values of N tokens, then attend each to its sequence's cache.

        Args:
            query: [heads, N, head_dim]; like `key` and `value`, with a dense last dimension
            key: [kv_heads, N, head_dim]
            value: [kv_heads, N, head_dim]
            keys: a layer's cache, [blocks, block_size, kv_heads, head_dim]
            values: the same
            tables: int32 [N, ...]; the blocks of each sequence
            lens: int64 [N]; tokens of each sequence, with this one
            output: [N, heads, head_dim], dense; is filled
            scaling: factor of the scores
            window: how many tokens a query sees, itself included; None: all
            softcap: the scores go through `softcap * tanh(score / softcap)`; None: they do not
            sinks: float32 [heads]; scores of a key without a value that every query sees
        """


def choose_decode_kernel(device: torch.device, dtype: torch.dtype, shapes: list[LayerShape]) -> DecodeKernel | None:
    """Return our kernel for such a cache; None where there is none, and stock operators must do."""
    from ftserve.engine import native

    if native.supports(device, dtype, shapes):
        return native.load_decode_kernel()
    if device.type != "cuda":
        return None
    from ftserve.engine import triton_decode

    if not triton_decode.supports(device, dtype, shapes):
        return None
    kernel = triton_decode.TritonDecode(torch.cuda.get_device_properties(device).multi_processor_count)
    shape = shapes[0]
    return kernel if _is_right(kernel, device, dtype, shape) else None


def _is_right(kernel: DecodeKernel, device: torch.device, dtype: torch.dtype, shape: LayerShape) -> bool:
    """Tell whether `kernel` computes on `device` what the formulas say; warns if not."""
    try:
        error = largest_error(kernel, device, dtype, shape)
        problem = None if error < 0.03 else f"it is off by {error:.3g}"  # an output's standard deviation is about 0.1
    except Exception as exc:  # noqa: BLE001 - whatever a compiler or a driver makes of it
        problem = type(exc).__name__
    if problem is not None:
        log.warning("decode attention runs on stock operators, since our kernel fails on %s: %s", device, problem)
    return problem is None


def largest_error(kernel: DecodeKernel, device: torch.device, dtype: torch.dtype, shape: LayerShape) -> float:
    """Return the largest difference between the kernel and the formulas, for three sequences of random numbers."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    lens, block_size, group = torch.tensor([1, 47, 160], device=device), 16, 4
    dim, kv_heads = shape.key_dim, shape.kv_heads
    keys, values = random(31, block_size, kv_heads, dim), random(31, block_size, kv_heads, dim)
    tables = torch.arange(1, 31, dtype=torch.int32, device=device).view(3, 10)
    query, key, value = random(kv_heads * group, 3, dim), random(kv_heads, 3, dim), random(kv_heads, 3, dim)
    output = torch.empty(3, kv_heads * group, dim, dtype=dtype, device=device)
    options = {"scaling": dim**-0.5, "window": None, "softcap": None, "sinks": None}
    kernel(query, key, value, keys=keys, values=values, tables=tables, lens=lens, output=output, **options)
    error = 0.0
    for token, length in enumerate(lens.tolist()):
        cached_key = keys[tables[token].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
        cached_value = values[tables[token].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
        scores = torch.einsum("hd,lhd->hl", query[:, token].float(), cached_key) * dim**-0.5
        wanted = torch.einsum("hl,lhd->hd", scores.softmax(-1), cached_value)
        error = max(error, float((output[token].float() - wanted).abs().max()))
    return error
