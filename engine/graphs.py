"""Decode steps as captured CUDA graphs, one for each of some batch sizes: a step is then one launch, not thousands.

A transformers model launches some hundred kernels a layer stack from Python, which takes longer than the device needs
for a decode step. A graph replays them with the addresses it was captured with, so the inputs of a step are copied into
tensors that stay, and a batch smaller than its graph is filled up with rows that decode into the null block. The host's
side of them there is twice: one may still be on its way while the next step's is written.

It has not run on hardware. Capturing and replaying are the only parts that the tests replace (`Capture`); at start each
graph is compared with the plain model, and the engine does without, with a warning, where one differs or fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ftserve.engine.attention import PagedBatch
from ftserve.engine.kernels import DecodeKernel
from ftserve.engine.kv_cache import KVCache

log = logging.getLogger("ftserve.engine")

Forward = Callable[[Tensor, Tensor, PagedBatch], Tensor]  # ids [1, N], positions [1, N] -> logits [N, vocabulary]
# Runs a function in such a way that it can be run again, on the same memory: returns that, and what it returned.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]

_WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries set themselves up


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that get a graph: powers of two, then multiples of 8, 16 and 32, up to the largest."""
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs + 1, 32)]
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]


def capture_on_cuda(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Be a `Capture` on the current CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


@dataclass(frozen=True, slots=True)
class _Graph:
    size: int
    replay: Callable[[], None]
    logits: Tensor  # [size, vocabulary]; overwritten by each replay


class _HostInputs:
    """A step's inputs on the host, from where the device fetches them."""

    def __init__(self, max_num_seqs: int, max_blocks: int, *, is_pinned: bool) -> None:
        self.numbers = torch.zeros(3, max_num_seqs, dtype=torch.int64, pin_memory=is_pinned)
        self.tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, pin_memory=is_pinned)
        self._fill_up(0, max_num_seqs)

    def fill(self, token_ids: np.ndarray, positions: np.ndarray, tables: np.ndarray, size: int) -> None:
        """Write a step of N decodes for a graph of `size`; see `DecodeGraphs.run`."""
        count, longest = tables.shape
        numbers = self.numbers.numpy()
        numbers[0, :count], numbers[1, :count], numbers[2, :count] = token_ids, positions, positions + 1
        self.tables.numpy()[:count, :longest] = tables
        self._fill_up(count, size)

    def _fill_up(self, begin: int, end: int) -> None:
        """Make rows decode token 0 as the first of the null block."""
        numbers = self.numbers.numpy()
        numbers[:2, begin:end] = 0
        numbers[2, begin:end] = 1
        self.tables.numpy()[begin:end] = 0


class DecodeGraphs:
    """The graphs of one model over one cache. Engine thread only."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        kernel: DecodeKernel,
        *,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Capture every graph, the largest first, so that the others fit into its memory.

        Raises:
            RuntimeError: the model cannot be captured, or a graph computes something else than the model.
        """
        self._cache = cache
        self._kernel = kernel
        self._host_inputs = [_HostInputs(max_num_seqs, max_blocks, is_pinned=device.type == "cuda") for _ in range(2)]
        self._turn = 0
        # A step's ids, positions and lengths, and its block tables.
        self._numbers = self._host_inputs[0].numbers.to(device, copy=True)
        self._tables = self._host_inputs[0].tables.to(device, copy=True)
        self._graphs: list[_Graph] = []  # by ascending size
        for size in reversed(bucket_sizes(max_num_seqs)):
            self._graphs.insert(0, self._make(size, forward, capture))

    @torch.inference_mode()
    def run(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        tables: np.ndarray,
        patch: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return logits [N, vocabulary] of a step of N decodes, valid until the next step.

        Args:
            token_ids: int64 [N]
            positions: int64 [N], of these tokens in their sequences
            tables: int32 [N, longest]; blocks of each sequence
            patch: which of the ids the device knows better, and what they are, int64 [U] each
        """
        count, longest = tables.shape
        graph = next(graph for graph in self._graphs if graph.size >= count)
        size, inputs = graph.size, self._host_inputs[self._turn]
        self._turn = 1 - self._turn
        inputs.fill(token_ids, positions, tables, size)
        self._numbers[:, :size].copy_(inputs.numbers[:, :size], non_blocking=True)
        self._tables[:size, :longest].copy_(inputs.tables[:size, :longest], non_blocking=True)
        if patch is not None:
            self._numbers[0].index_copy_(0, *patch)
        graph.replay()
        return graph.logits[:count]

    @torch.inference_mode()
    def _make(self, size: int, forward: Forward, capture: Capture) -> _Graph:
        ids, positions, lens = self._numbers[:, :size]
        tables = self._tables[:size]

        def step() -> Tensor:
            # Made anew in each run: it keeps what the layers of one run share.
            batch = PagedBatch(
                cache=self._cache,
                rows=lens,  # of no use to a kernel, which stores by the tables
                num_decodes=size,
                tables=tables,
                context_lens=lens,
                chunks=[],
                kernel=self._kernel,
            )
            return forward(ids[None], positions[None], batch)

        wanted = step().float()
        replay, logits = capture(step)
        replay()
        error = float((logits.float() - wanted).abs().max())
        if not error <= 0.01 * float(wanted.abs().max()):
            raise RuntimeError(f"the graph of {size} sequences is off by {error:.3g}")
        return _Graph(size, replay, logits)
