"""Run the model over the flat batch of a step. Engine thread only, the one that touches the device."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ftserve.engine.attention import PagedBatch, PromptChunk
from ftserve.engine.graphs import Capture, DecodeGraphs, capture_on_cuda
from ftserve.engine.kernels import DecodeKernel
from ftserve.engine.kv_cache import KVCache
from ftserve.engine.sampler import TokenReading
from ftserve.engine.scheduler import StepPlan
from ftserve.engine.sequence import Sequence
from ftserve.engine.transfer import upload

log = logging.getLogger("ftserve.engine")


class ModelRunner:
    """A model, its cache, and the tables that tell one from the other's numbers."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        kernel: DecodeKernel | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernel = kernel
        self._device = model.device
        # Blocks of each running sequence, by its slot; what lies beyond its own is stale and never read.
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // cache.block_size)), np.int32)
        self._graphs: DecodeGraphs | None = None

    def use_graphs(self, capture: Capture = capture_on_cuda) -> None:
        """Capture the decode steps, if the model lets itself be captured. Once, before the first step."""
        if self._kernel is None:
            return
        max_num_seqs, max_blocks = self._tables.shape
        try:
            self._graphs = DecodeGraphs(
                self._forward,
                self._cache,
                self._kernel,
                max_num_seqs=max_num_seqs,
                max_blocks=max_blocks,
                device=self._device,
                capture=capture,
            )
        except RuntimeError as exc:
            log.warning("decode steps run without CUDA graphs: %s", exc)
        self._cache.clear([0])  # captures wrote into the null block, which is never read without a mask

    def run(self, plan: StepPlan, unread: TokenReading | None) -> Tensor:
        """Queue the step and return logits, in the model's dtype: rows for `plan.sampled()`, then `plan.scored()`.

        Raises:
            MemoryError: the device has not enough memory for this step.
        """
        try:
            return self._run(plan, unread)
        except RuntimeError as exc:
            if is_out_of_memory(exc):
                raise MemoryError from exc
            raise

    @torch.inference_mode()
    def _run(self, plan: StepPlan, unread: TokenReading | None) -> Tensor:
        for sequence in plan.regrown:  # first of all: a plan is told only once, even if what follows fails
            self._tables[sequence.slot, : len(sequence.blocks)] = sequence.blocks
        token_ids, positions = self._tokens(plan)
        patch = None if unread is None else self._unread_tokens(plan.decodes, unread)
        if self._graphs is not None and not plan.prefills:
            tables = self._decode_tables([sequence.slot for sequence in plan.decodes], positions + 1)
            return self._graphs.run(token_ids, positions, tables, patch)
        ids = self._upload(token_ids)
        if patch is not None:
            ids.index_copy_(0, *patch)
        return self._compute(plan, ids, positions)

    def _compute(self, plan: StepPlan, token_ids: Tensor, positions: np.ndarray) -> Tensor:
        """Return the logits of the step; ids and positions (indices in their sequences) are int64 [T]."""
        return self._forward(
            token_ids[None],
            self._upload(positions)[None],
            self._paged_batch(plan, positions),
            self._upload(self._rows_to_keep(plan)),
        )

    def _forward(
        self, token_ids: Tensor, positions: Tensor, paged: PagedBatch, rows_to_keep: Tensor | int = 0
    ) -> Tensor:
        """Return logits of `rows_to_keep` (0: all) of a flat batch; ids and positions are [1, T]."""
        output = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows_to_keep, paged=paged
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def clear(self, blocks: list[int]) -> None:
        """Make blocks harmless that hold values which are no numbers."""
        with torch.inference_mode():
            self._cache.clear(blocks)

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self._device)

    def _unread_tokens(self, decodes: list[Sequence], unread: TokenReading) -> tuple[Tensor, Tensor] | None:
        """Return which tokens of the flat batch only the device knows, and their ids, int64 [U] each."""
        places = [(at, sequence.row) for at, sequence in enumerate(decodes) if sequence.is_unread]
        if not places:
            return None
        index, rows = self._upload(np.array(places, np.int64).T.copy())
        return index, unread.chosen[rows]

    def _tokens(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and positions of the flat batch, int64 [T] each."""
        token_ids = [sequence.token_ids[-1] for sequence in plan.decodes]
        positions = [sequence.num_computed for sequence in plan.decodes]
        for sequence, count in plan.prefills:
            start = sequence.num_computed
            token_ids += sequence.token_ids[start : start + count]
            positions += range(start, start + count)
        return np.array(token_ids, np.int64), np.array(positions, np.int64)

    def _rows_to_keep(self, plan: StepPlan) -> np.ndarray:
        rows = list(range(len(plan.decodes)))
        begin = len(rows)
        scored: list[int] = []
        for sequence, count in plan.prefills:
            if sequence.scores_prompt:
                scored += range(begin, begin + min(count, sequence.prompt_len - 1 - sequence.num_computed))
            begin += count
            if count == sequence.num_pending:
                rows.append(begin - 1)
        return np.array(rows + scored, np.int64)

    def _paged_batch(self, plan: StepPlan, positions: np.ndarray) -> PagedBatch:
        """Return where the tokens of the step, at `positions` of their sequences, find their cache."""
        size, num_decodes = self._cache.block_size, len(plan.decodes)
        slots = [sequence.slot for sequence in plan.decodes]
        for sequence, count in plan.prefills:
            slots += [sequence.slot] * count
        rows = self._tables[slots, positions // size].astype(np.int64) * size + positions % size
        context_lens = positions[:num_decodes] + 1
        return PagedBatch(
            cache=self._cache,
            rows=self._upload(rows),
            num_decodes=num_decodes,
            tables=self._upload(self._decode_tables(slots[:num_decodes], context_lens)),
            context_lens=self._upload(context_lens),
            chunks=self._chunks(plan),
            kernel=self._kernel,
        )

    def _decode_tables(self, slots: list[int], context_lens: np.ndarray) -> np.ndarray:
        """Return the block tables of the decoding sequences, cut to the longest, padded with the null block."""
        if not slots:
            return np.zeros((0, 0), np.int32)
        used = -(-context_lens // self._cache.block_size)
        longest = int(used.max())
        return np.where(np.arange(longest) < used[:, None], self._tables[slots, :longest], 0)

    def _chunks(self, plan: StepPlan) -> list[PromptChunk]:
        chunks, start = [], len(plan.decodes)
        for sequence, count in plan.prefills:
            context_len = sequence.num_computed + count
            used = -(-context_len // self._cache.block_size)
            blocks = self._upload(np.array(sequence.blocks[:used], np.int64))
            chunks.append(PromptChunk(start, count, context_len, blocks))
            start += count
        return chunks


def is_out_of_memory(exc: RuntimeError) -> bool:
    """Tell whether an allocation failed; on the CPU torch has no class for it."""
    return isinstance(exc, torch.OutOfMemoryError) or "can't allocate memory" in str(exc)
