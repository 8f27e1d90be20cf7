"""Our own CUDA kernel for decode attention, in Triton: the twin of `paged_decode.cpp` for blocks of any size.

The FlashAttention inside torch takes no block table (torch 2.12: only with a FlashAttention 3 installed beside it), and
the stand-alone one wants blocks of 256 tokens. Each program attends the query heads that share one key head of one
sequence to a part of its cache ("split"), a second kernel joins the parts (flash decoding, Dao et al. 2023).

It has not run on hardware: the tests run it on Triton's interpreter. So `kernels.choose_decode_kernel` compares it with
the formulas on the device itself, and leaves it out with a warning where they differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftserve.engine.kv_cache import LayerShape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256

_TILE = 64  # tokens of the cache in one product
_MIN_DOT = 16  # rows and columns that a product of tensor cores has at least
_MAX_SPLITS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    new_key,
    new_value,
    keys,
    values,
    tables,
    lens,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    table_stride,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Put one token's key and value of one head into the cache. Grid: [tokens, kv_heads]."""
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(lens + token) - 1
    block = tl.load(tables + token * table_stride + position // BLOCK_SIZE).to(tl.int64)
    row = ((block * BLOCK_SIZE + position % BLOCK_SIZE) * kv_heads + head) * HEAD_DIM
    dims = tl.arange(0, DIM)
    inside = dims < HEAD_DIM
    key = tl.load(new_key + head * key_head_stride + token * key_token_stride + dims, mask=inside)
    value = tl.load(new_value + head * value_head_stride + token * value_token_stride + dims, mask=inside)
    tl.store(keys + row + dims, key, mask=inside)
    tl.store(values + row + dims, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(
    query,
    keys,
    values,
    tables,
    lens,
    sums,
    maxima,
    weights,
    query_head_stride,
    query_token_stride,
    table_stride,
    kv_heads,
    scaling,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend GROUP query heads to one part of the cache. Grid: [tokens, kv_heads, splits].

    Writes weighted sums of values float32 [tokens, kv_heads, splits, GROUP, HEAD_DIM], and the largest score and the
    sum of the weights [tokens, kv_heads, splits, GROUP].
    """
    token, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lens + token)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    tile_from, tile_to = first // TILE, tl.cdiv(length, TILE)
    per_part = tl.cdiv(tile_to - tile_from, splits)
    begin = tile_from + part * per_part
    end = tl.minimum(begin + per_part, tile_to)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    is_query = (rows[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    query_at = query + token * query_token_stride + (head * GROUP + rows[:, None]) * query_head_stride + dims[None, :]
    q = tl.load(query_at, mask=is_query, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    for tile in range(begin, end):
        positions = tile * TILE + tl.arange(0, TILE)
        is_seen = (positions >= first) & (positions < length)
        block = tl.load(tables + token * table_stride + positions // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        at = ((block * BLOCK_SIZE + positions % BLOCK_SIZE) * kv_heads + head) * HEAD_DIM
        is_loaded = is_seen[:, None] & (dims[None, :] < HEAD_DIM)
        k = tl.load(keys + at[:, None] + dims[None, :], mask=is_loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new_largest)
        p = tl.exp(scores - new_largest[:, None])
        v = tl.load(values + at[:, None] + dims[None, :], mask=is_loaded, other=0.0)
        summed = summed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        largest = new_largest
    row = ((token * kv_heads + head) * splits + part) * GROUP + rows
    tl.store(maxima + row, largest, mask=rows < GROUP)
    tl.store(weights + row, total, mask=rows < GROUP)
    tl.store(sums + row[:, None] * HEAD_DIM + dims[None, :], summed, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(
    sums,
    maxima,
    weights,
    sinks,
    output,
    kv_heads,
    splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join the parts of one query head of one token. Grid: [tokens, heads]."""
    token, query_head = tl.program_id(0), tl.program_id(1)
    head, member = query_head // GROUP, query_head % GROUP
    parts, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    rows = ((token * kv_heads + head) * splits + parts) * GROUP + member
    is_part, inside = parts < splits, dims < HEAD_DIM
    largest = tl.load(maxima + rows, mask=is_part, other=float("-inf"))
    overall = tl.max(largest, 0)
    if HAS_SINKS:  # a key without a value that every query sees
        sink = tl.load(sinks + query_head)
        overall = tl.maximum(overall, sink)
    share = tl.where(largest == float("-inf"), 0.0, tl.exp(largest - overall))  # a part may have had nothing to see
    total = tl.sum(share * tl.load(weights + rows, mask=is_part, other=0.0), 0)
    if HAS_SINKS:
        total += tl.exp(sink - overall)
    part_sums = tl.load(
        sums + rows[:, None] * HEAD_DIM + dims[None, :], mask=is_part[:, None] & inside[None, :], other=0.0
    )
    result = tl.sum(share[:, None] * part_sums, 0) / total
    tl.store(output + (token * kv_heads * GROUP + query_head) * HEAD_DIM + dims, result, mask=inside)


class TritonDecode:
    """The `DecodeKernel` of a CUDA device."""

    def __init__(self, num_processors: int) -> None:
        """Prepare for a device with so many streaming multiprocessors."""
        self._num_processors = num_processors

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
        """See `DecodeKernel`; tensors are of one of `DTYPES`."""
        heads, tokens, head_dim = query.shape
        _, block_size, kv_heads, _ = keys.shape
        group, dim = heads // kv_heads, max(_MIN_DOT, triton.next_power_of_2(head_dim))
        splits = self._splits(tokens * kv_heads)
        partial = torch.empty(tokens * heads * splits, head_dim + 2, dtype=torch.float32, device=query.device)
        sums, maxima, weights = partial.view(-1).split([partial.shape[0] * head_dim, *[partial.shape[0]] * 2])
        sizes = {"HEAD_DIM": head_dim, "DIM": dim}
        _store[tokens, kv_heads](
            *(key, value, keys, values, tables, lens),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1), tables.stride(0), kv_heads),
            BLOCK_SIZE=block_size,
            **sizes,
        )
        _attend_part[tokens, kv_heads, splits](
            *(query, keys, values, tables, lens, sums, maxima, weights),
            *(query.stride(0), query.stride(1), tables.stride(0), kv_heads, scaling, softcap or 0.0, window or 0),
            GROUP=group,
            BLOCK_SIZE=block_size,
            ROWS=max(_MIN_DOT, triton.next_power_of_2(group)),
            TILE=_TILE,
            **sizes,
        )
        _join_parts[tokens, heads](
            *(sums, maxima, weights, sums if sinks is None else sinks, output, kv_heads, splits),
            GROUP=group,
            SPLITS=triton.next_power_of_2(splits),
            HAS_SINKS=sinks is not None,
            **sizes,
        )

    def _splits(self, programs: int) -> int:
        """Return into how many parts a cache is cut, so that two programs a multiprocessor have work."""
        wanted: int = triton.next_power_of_2(triton.cdiv(2 * self._num_processors, programs))
        return max(1, min(_MAX_SPLITS, wanted))


def supports(device: torch.device, dtype: torch.dtype, shapes: list[LayerShape]) -> bool:
    """Tell whether the kernel is for such a cache."""
    return (
        device.type == "cuda"
        and dtype in DTYPES
        and all(shape.key_dim == shape.value_dim <= MAX_HEAD_DIM for shape in shapes)
    )
