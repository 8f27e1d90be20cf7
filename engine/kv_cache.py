"""The memory that holds keys and values, and what each layer stores in it. Engine thread only.

Layout, on every device: keys and values of a layer are `[1 + num_blocks, block_size, kv_heads, head_dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores of a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Keys and values of every layer. All zero at first, so that what is masked out is finite."""

    def __init__(
        self, shapes: list[LayerShape], num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_blocks` blocks and the null block. On the CPU, memory is only used when it is first written."""
        rows = num_blocks + 1
        self.block_size = block_size
        self.keys = [
            torch.zeros(rows, block_size, shape.kv_heads, shape.key_dim, dtype=dtype, device=device) for shape in shapes
        ]
        self.values = [
            torch.zeros(rows, block_size, shape.kv_heads, shape.value_dim, dtype=dtype, device=device)
            for shape in shapes
        ]

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens `[T, kv_heads, head_dim]` at `rows` (int64 [T]; block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, rows, key)
        self.values[layer].flatten(0, 1).index_copy_(0, rows, value)

    def clear(self, blocks: list[int]) -> None:
        """Set blocks to zero in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[blocks] = 0
