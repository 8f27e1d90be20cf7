"""What changes logits before a token is chosen: logit bias, `min_tokens`, and penalties for what was said before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ftserve.engine.sequence import Sequence
from ftserve.engine.transfer import upload
from ftserve.engine.types import SamplingParams


def _is_penalized(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class Adjustments:
    """Adjusts the logits of one batch after another. Engine thread only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, token ids, values
        self._short: list[tuple[int, Sequence]] = []  # rows whose sequence may not end yet
        self._said: dict[int, Said] = {}  # of the penalized sequences of the batch, by their arrival
        self._penalties: Penalties | None = None

    def describe(self, sequences: list[Sequence]) -> None:
        """Take the sequences of the next steps, in the order of the logits' rows."""
        self._bias = self._make_bias(sequences)
        self._short = [(row, s) for row, s in enumerate(sequences) if s.must_go_on]
        penalized = [(row, s) for row, s in enumerate(sequences) if _is_penalized(s.request.sampling)]
        self._said = {s.arrival: self._said.get(s.arrival) or Said(s) for _, s in penalized}
        said = list(self._said.values())
        self._penalties = Penalties([row for row, _ in penalized], said, self._device) if penalized else None

    @property
    def is_idle(self) -> bool:
        """Tell whether `apply` would change nothing."""
        return self._bias is None and self._penalties is None and not self._short

    def apply(self, logits: Tensor) -> None:
        """Adjust float32 `logits` [S, vocabulary] in place."""
        if self._bias is not None:
            rows, ids, values = self._bias
            logits.index_put_((rows, ids), values, accumulate=True)
        if self._short:
            self._short = [(row, s) for row, s in self._short if s.must_go_on]
            for row, sequence in self._short:
                stops = self._upload((k for k in sequence.stop_ids if 0 <= k < self._vocab_size), np.int64)
                logits[row].index_fill_(0, stops, float("-inf"))
        if self._penalties is not None:
            self._penalties.apply(logits)

    def _make_bias(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [
            (row, token_id, value)
            for row, sequence in enumerate(sequences)
            for token_id, value in sequence.request.sampling.logit_bias
            if 0 <= token_id < self._vocab_size
        ]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        return self._upload(rows, np.int64), self._upload(ids, np.int64), self._upload(values, np.float32)

    def _upload(self, values: Iterable[float], dtype: type[np.generic]) -> Tensor:
        return upload(np.array([*values], dtype), self._device)


class Said:
    """The different tokens of one sequence that its penalties look at, and how often each was sampled."""

    __slots__ = ("_index", "_known", "counts", "ids", "sequence", "size")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.size = 0
        self.ids = np.zeros(64, np.int64)  # the first `size`
        self.counts = np.zeros(64, np.float32)  # in the output
        self._index: dict[int, int] = {}
        # How many tokens of the sequence were looked at. The prompt only counts as repeated.
        self._known = 0 if sequence.request.sampling.repetition_penalty != 1.0 else sequence.prompt_len

    def update(self) -> None:
        """Look at the tokens that came since the last time."""
        token_ids, prompt_len = self.sequence.token_ids, self.sequence.prompt_len
        for position in range(self._known, len(token_ids)):
            at = self._place(token_ids[position])
            if position >= prompt_len:
                self.counts[at] += 1
        self._known = len(token_ids)

    def _place(self, token_id: int) -> int:
        at = self._index.get(token_id)
        if at is None:
            at = self._index[token_id] = self.size
            self.size += 1
            if at == len(self.ids):
                self.ids, self.counts = np.resize(self.ids, 2 * at), np.resize(self.counts, 2 * at)
            self.ids[at], self.counts[at] = token_id, 0
        return at


class Penalties:
    """The penalties of one batch, applied to just those logits that they change."""

    def __init__(self, rows: list[int], said: list[Said], device: torch.device) -> None:
        params = [s.sequence.request.sampling for s in said]
        self._said = said
        self._device = device
        self._rows = np.array(rows, np.int64)
        self._strengths = np.array(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params], np.float32
        )

    def apply(self, logits: Tensor) -> None:
        """Penalize float32 `logits` [S, vocabulary] in place, by the formulas of CTRL (repetition) and of OpenAI."""
        for said in self._said:
            said.update()
        sizes = [said.size for said in self._said]
        rows = self._upload(np.repeat(self._rows, sizes))
        ids = self._upload(np.concatenate([said.ids[: said.size] for said in self._said]))
        counts = self._upload(np.concatenate([said.counts[: said.size] for said in self._said]))
        repetition, frequency, presence = self._upload(np.repeat(self._strengths, sizes, axis=0)).unbind(-1)
        own = logits[rows, ids]
        own = torch.where(own > 0, own / repetition, own * repetition)
        logits[rows, ids] = own - counts * frequency - (counts > 0) * presence

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self._device)
