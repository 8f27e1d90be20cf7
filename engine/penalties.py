"""What changes logits before a token is chosen: logit bias, `min_tokens`, and penalties for what was said before."""

from __future__ import annotations

import torch
from torch import Tensor

from ftserve.engine.sequence import Sequence
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
        self._penalties: Penalties | None = None
        self._tables = PenaltyTables(vocab_size, device)

    def describe(self, sequences: list[Sequence]) -> None:
        """Take the sequences of the next steps, in the order of the logits' rows."""
        self._bias = self._make_bias(sequences)
        self._short = [(row, s) for row, s in enumerate(sequences) if s.must_go_on]
        penalized = [(row, s) for row, s in enumerate(sequences) if _is_penalized(s.request.sampling)]
        self._tables.keep([s for _, s in penalized])
        self._penalties = Penalties(penalized, self._tables, self._device) if penalized else None

    def apply(self, logits: Tensor) -> Tensor:
        """Return adjusted `logits` [S, vocabulary], float32 if there was anything to do; may overwrite them."""
        if self._short:
            self._short = [(row, s) for row, s in self._short if s.must_go_on]
        if self._bias is None and not self._short and self._penalties is None:
            return logits
        logits = logits.float()
        if self._bias is not None:
            rows, ids, values = self._bias
            logits.index_put_((rows, ids), values, accumulate=True)
        for row, sequence in self._short:
            logits[row, list(sequence.stop_ids)] = float("-inf")
        if self._penalties is not None:
            self._penalties.apply(logits)
        return logits

    def count(self, chosen: Tensor) -> None:
        """Remember the tokens, int64 [S], that were chosen from what `apply` returned."""
        if self._penalties is not None:
            self._penalties.count(chosen)

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
        device = self._device
        return torch.tensor(rows, device=device), torch.tensor(ids, device=device), torch.tensor(values, device=device)


class PenaltyTables:
    """How often each live penalized sequence has said each token. Rows grow with the number of such sequences."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)  # in the output
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # in the prompt or the output
        self._row_of: dict[int, int] = {}  # by the sequence's arrival

    def row(self, sequence: Sequence) -> int:
        return self._row_of[sequence.arrival]

    def keep(self, sequences: list[Sequence]) -> None:
        """Hold rows for exactly these sequences; a new one's row is filled from its tokens."""
        live = {sequence.arrival for sequence in sequences}
        self._row_of = {arrival: row for arrival, row in self._row_of.items() if arrival in live}
        new = [sequence for sequence in sequences if sequence.arrival not in self._row_of]
        if not new:
            return
        self._grow(len(live))
        free = sorted(set(range(len(self.counts))) - set(self._row_of.values()), reverse=True)
        for sequence in new:
            row = self._row_of[sequence.arrival] = free.pop()
            self._fill(row, sequence)

    def _grow(self, needed: int) -> None:
        rows, vocab_size = self.counts.shape
        if needed > rows:
            extra = max(needed, 2 * rows) - rows
            self.counts = torch.cat([self.counts, self.counts.new_zeros(extra, vocab_size)])
            self.seen = torch.cat([self.seen, self.seen.new_zeros(extra, vocab_size)])

    def _fill(self, row: int, sequence: Sequence) -> None:
        ids = torch.tensor(sequence.token_ids, device=self.counts.device)
        output = ids[sequence.prompt_len :]
        self.counts[row] = 0
        self.counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        self.seen[row] = False
        self.seen[row, ids] = True


class Penalties:
    """The penalties of one batch: P rows of its logits, and the rows of the tables that go with them."""

    def __init__(self, penalized: list[tuple[int, Sequence]], tables: PenaltyTables, device: torch.device) -> None:
        params = [sequence.request.sampling for _, sequence in penalized]
        self._tables = tables
        self._rows = torch.tensor([row for row, _ in penalized], device=device)
        self._table_rows = torch.tensor([tables.row(sequence) for _, sequence in penalized], device=device)
        self._repetition = torch.tensor([p.repetition_penalty for p in params], device=device)[:, None]
        self._presence = torch.tensor([p.presence_penalty for p in params], device=device)[:, None]
        self._frequency = torch.tensor([p.frequency_penalty for p in params], device=device)[:, None]

    def apply(self, logits: Tensor) -> None:
        """Penalize float32 `logits` [S, vocabulary] in place, by the formulas of CTRL (repetition) and of OpenAI."""
        own = logits[self._rows]
        counts, seen = self._tables.counts[self._table_rows], self._tables.seen[self._table_rows]
        repeated = torch.where(own > 0, own / self._repetition, own * self._repetition)
        own = torch.where(seen, repeated, own)
        own -= counts * self._frequency + (counts > 0) * self._presence
        logits.index_copy_(0, self._rows, own)

    def count(self, chosen: Tensor) -> None:
        ids = chosen[self._rows]
        self._tables.counts.index_put_(
            (self._table_rows, ids), torch.ones_like(ids, dtype=torch.float32), accumulate=True
        )
        self._tables.seen[self._table_rows, ids] = True
