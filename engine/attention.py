"""Attention of a flat batch of sequences over the paged cache, in the form that transformers' models call.

Every attention layer calls `paged_attention` with the queries, keys and values of the whole flat batch. It puts keys
and values into the cache and attends each token to its own sequence's cache. What it needs to know of the batch comes
as the keyword `paged`, which the models pass through to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ftserve.engine.kernels import DecodeKernel
from ftserve.engine.kv_cache import KVCache

IMPLEMENTATION = "ftserve"  # name under which transformers knows us


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Consecutive tokens of one prompt in the flat batch."""

    start: int  # of its tokens in the flat batch
    count: int
    context_len: int  # tokens of the sequence, up to and with the chunk
    blocks: Tensor  # int64 [ceil(context_len / block_size)]


@dataclass(slots=True)
class PagedBatch:
    """One step's flat batch of T tokens: first `num_decodes` single tokens, then `chunks`."""

    cache: KVCache
    rows: Tensor  # int64 [T]; where each token's key and value go
    num_decodes: int
    tables: Tensor  # int32 [num_decodes, longest]; blocks of each sequence, padded with the null block
    context_lens: Tensor  # int64 [num_decodes]; tokens of the sequence, up to and with this one
    chunks: list[PromptChunk]
    kernel: DecodeKernel | None = None  # None: stock operators
    _masks: dict[Any, Tensor] = field(default_factory=dict)  # the same in every layer of one window

    def decode_mask(self, window: int | None) -> Tensor:
        """Return bool [num_decodes, 1, 1, longest * block_size]: which cached tokens each query sees."""
        mask = self._masks.get(window)
        if mask is None:
            positions = torch.arange(self.tables.shape[1] * self.cache.block_size, device=self.tables.device)
            lens = self.context_lens[:, None]
            mask = positions < lens
            if window is not None:
                mask &= positions >= lens - window
            self._masks[window] = mask = mask[:, None, None, :]
        return mask

    def chunk_mask(self, chunk: PromptChunk, window: int | None) -> Tensor:
        """Return bool [count, context_len]: causal, within the window."""
        mask = self._masks.get((chunk.start, window))
        if mask is None:
            device = self.rows.device
            keys = torch.arange(chunk.context_len, device=device)
            queries = torch.arange(chunk.context_len - chunk.count, chunk.context_len, device=device)[:, None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[chunk.start, window] = mask
        return mask


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend; `query` [1, heads, T, head_dim], `key` and `value` [1, kv_heads, T, head_dim].

    `scaling`, `sliding_window` (keys that a query sees, itself included), `softcap` and `s_aux` (attention sinks
    [heads]) mean what they mean in transformers.

    Returns:
        [1, T, heads, value_dim], and None in place of the weights.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_decodes = paged.num_decodes
    query, key, value = query[0], key[0], value[0]
    options = _Options(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
    stored = 0
    if num_decodes and paged.kernel is not None:
        _decode_natively(paged, paged.kernel, layer, (query, key, value), options, output)
        stored = num_decodes
    if stored < len(output):
        paged.cache.write(
            layer, paged.rows[stored:], key[:, stored:].transpose(0, 1), value[:, stored:].transpose(0, 1)
        )
    if stored < num_decodes:
        output[:num_decodes] = _decode(paged, layer, query[:, :num_decodes], options)
    for chunk in paged.chunks:
        span = slice(chunk.start, chunk.start + chunk.count)
        output[span] = _prefill(paged, layer, chunk, query[:, span], options).transpose(0, 1)
    return output[None], None


@dataclass(frozen=True, slots=True)
class _Options:
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _decode_natively(
    paged: PagedBatch,
    kernel: DecodeKernel,
    layer: int,
    projections: tuple[Tensor, Tensor, Tensor],
    options: _Options,
    output: Tensor,
) -> None:
    """Store and attend single tokens, the first of `projections` [heads, T, head_dim]; fill the first of `output`."""
    query, key, value = (t[:, : paged.num_decodes] for t in projections)
    kernel(
        query,
        key,
        value,
        keys=paged.cache.keys[layer],
        values=paged.cache.values[layer],
        tables=paged.tables,
        lens=paged.context_lens,
        output=output[: paged.num_decodes],
        scaling=options.scaling,
        window=options.window,
        softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks.float(),
    )


def _decode(paged: PagedBatch, layer: int, query: Tensor, options: _Options) -> Tensor:
    """Attend single tokens, `query` [heads, N, head_dim]; return [N, heads, value_dim].

    The query heads that share a key head are the rows of one product.
    """
    cache, tables = paged.cache, paged.tables.long()
    kv_heads = cache.keys[layer].shape[2]
    heads = query.shape[0]
    key = cache.keys[layer][tables].flatten(1, 2).transpose(1, 2)  # [N, kv_heads, L, head_dim]
    value = cache.values[layer][tables].flatten(1, 2).transpose(1, 2)
    grouped = query.transpose(0, 1).unflatten(1, (kv_heads, heads // kv_heads))
    sinks = None if options.sinks is None else options.sinks.view(kv_heads, -1, 1)
    return _attend(grouped, key, value, paged.decode_mask(options.window), options, sinks).flatten(1, 2)


def _prefill(paged: PagedBatch, layer: int, chunk: PromptChunk, query: Tensor, options: _Options) -> Tensor:
    """Attend a chunk, `query` [heads, count, head_dim]; return [heads, count, value_dim]."""
    cache = paged.cache
    heads, kv_heads = query.shape[0], cache.keys[layer].shape[2]
    key = cache.keys[layer][chunk.blocks].flatten(0, 1)[: chunk.context_len].transpose(0, 1)[:, None]
    value = cache.values[layer][chunk.blocks].flatten(0, 1)[: chunk.context_len].transpose(0, 1)[:, None]
    group = heads // kv_heads  # [kv_heads, 1, L, head_dim] stands for each of the group, without a copy
    grouped = query.unflatten(0, (kv_heads, group))
    sinks = None if options.sinks is None else options.sinks.view(kv_heads, group, 1, 1)
    return _attend(
        grouped,
        key.expand(-1, group, -1, -1),
        value.expand(-1, group, -1, -1),
        paged.chunk_mask(chunk, options.window),
        options,
        sinks,
    ).flatten(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: _Options, sinks: Tensor | None) -> Tensor:
    """Attend within each of the two leading dimensions; `mask` is bool and broadcasts to the scores."""
    if options.softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=options.scaling)
    scores = (query @ key.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # a key without a value that every query sees
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value


def register() -> None:
    """Make our attention known to transformers. No mask function goes with it, so models build no masks."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
