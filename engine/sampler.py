"""Choose one token per row of logits. Batched on the device; a batch that uses no extras pays for none.

In the order of application: logit bias and `min_tokens`, repetition, frequency and presence penalties, temperature,
min-p, top-k, top-p (of what top-k left), draw.

A draw depends on the row's logits and on one number from [0, 1) that is a function of (seed, index of the choice,
index of the token) alone: no generator, no state. So the same seed gives the same text whatever else is in the batch,
and after a preemption too. Every filter is a threshold on the logits, which equal logits pass or miss together, so that
ties cannot make a result depend on the batch either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ftserve.engine.penalties import Adjustments
from ftserve.engine.sequence import Sequence

GREEDY_BELOW = 1e-5  # smaller temperatures would overflow float32, and are greedy for all that can be seen
_FIRST_CANDIDATES = 64  # largest logits that top-p looks at; times eight until they hold enough probability
_MASK64 = (1 << 64) - 1


def uniform(seed: int, choice: int, index: int) -> float:
    """Return a number from [0, 1) with 53 random bits; the finalizer is that of SplitMix64 (Steele et al. 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + choice * 0xD1B54A32D192ED03 + (index + 1) * 0x8CB92BA72F3D8DD7) & _MASK64
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


class Sampler:
    """Samples for the sequences of one engine. Engine thread only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._adjustments = Adjustments(vocab_size, device)
        self._key: tuple[int, ...] = ()  # the sequences that `_draws` and `_adjustments` are made for
        self._draws: Draws | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int | None]:
        """Return a token for each sequence from its row of `logits` [S, vocabulary]; None where they are no numbers.

        `logits` may be overwritten.
        """
        key = tuple([sequence.arrival for sequence in sequences])
        if key != self._key:
            self._key = key
            self._draws = Draws.of(sequences, self._device)
            self._adjustments.describe(sequences)
        logits = self._adjustments.apply(logits)
        largest, chosen = logits.max(dim=-1)
        if self._draws is not None:
            chosen.index_copy_(0, self._draws.rows, self._draws.draw(logits, largest))
        self._adjustments.count(chosen)
        tokens: list[int | None] = chosen.tolist()
        # NaN wins every maximum; an infinite one means that nothing may follow, or an overflow.
        for row, value in enumerate(largest.tolist()):
            if value - value != 0.0:
                tokens[row] = None
        return tokens


@dataclass(slots=True)
class Draws:
    """Parameters of those rows of the logits that are drawn, R of S. A parameter that is off in all of them is None."""

    sequences: list[Sequence]
    rows: Tensor  # int64 [R]
    is_everything: bool  # R = S
    temperature: Tensor | None  # float32 [R, 1]
    min_p: Tensor | None  # float32 [R, 1]
    top_k: Tensor | None  # int64 [R, 1]; 0 is off
    top_p: Tensor | None  # float32 [R, 1]
    largest_k: int

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> Draws | None:
        """Return the parameters of the sequences that are not greedy; None if all are."""
        drawn = [(row, s) for row, s in enumerate(sequences) if s.request.sampling.temperature >= GREEDY_BELOW]
        if not drawn:
            return None
        params = [s.request.sampling for _, s in drawn]

        def column(values: Iterable[float], off: float) -> Tensor | None:
            values = list(values)
            return None if all(v == off for v in values) else torch.tensor(values, device=device)[:, None]

        return cls(
            sequences=[s for _, s in drawn],
            rows=torch.tensor([row for row, _ in drawn], device=device),
            is_everything=len(drawn) == len(sequences),
            temperature=column((p.temperature for p in params), off=1.0),
            min_p=column((p.min_p for p in params), off=0.0),
            top_k=column((p.top_k for p in params), off=0),
            top_p=column((p.top_p for p in params), off=1.0),
            largest_k=max(p.top_k for p in params),
        )

    def draw(self, logits: Tensor, largest: Tensor) -> Tensor:
        """Return a token id per row, int64 [R], from `logits` [S, vocabulary] with their maxima `largest` [S]."""
        if not self.is_everything:
            logits, largest = logits[self.rows], largest[self.rows]
        weights = logits.float() - largest.float()[:, None]
        if self.temperature is not None:
            weights /= self.temperature
        threshold = self._threshold(weights)
        if threshold is not None:
            weights.masked_fill_(weights < threshold, float("-inf"))
        cumulated = weights.exp_().cumsum(dim=-1)
        numbers = [uniform(s.seed, s.request.index, s.output_len) for s in self.sequences]
        total = cumulated[:, -1:]
        points = torch.tensor(numbers, dtype=total.dtype, device=total.device)[:, None] * total
        points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))  # rounding may reach the total
        return torch.searchsorted(cumulated, points, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)

    def _threshold(self, weights: Tensor) -> Tensor | None:
        """Return the smallest log-weight that may be drawn, float32 [R, 1]; the largest log-weight is 0."""
        threshold = None if self.min_p is None else self.min_p.log()
        if self.top_k is None and self.top_p is None:
            return threshold
        if threshold is not None:
            weights = weights.masked_fill(weights < threshold, float("-inf"))
        sorted_out = self._top(weights)
        return sorted_out if threshold is None else torch.maximum(sorted_out, threshold)

    def _top(self, weights: Tensor) -> Tensor:
        """Return the threshold of top-k and top-p, looking at as few of the largest weights as will do."""
        vocab_size = weights.shape[-1]
        total = None if self.top_p is None else weights.exp().sum(dim=-1, keepdim=True)
        count = min(max(self.largest_k, 1 if self.top_p is None else _FIRST_CANDIDATES), vocab_size)
        while True:
            found, is_enough = self._top_of(weights.topk(count, dim=-1).values, total)
            if count == vocab_size or is_enough:
                return found
            count = min(count * 8, vocab_size)

    def _top_of(self, candidates: Tensor, total: Tensor | None) -> tuple[Tensor, bool]:
        """Return the threshold according to the largest weights, descending [R, C], and whether C was enough."""
        count = candidates.shape[-1]
        last = torch.full_like(candidates[:, :1], count - 1, dtype=torch.int64)  # index of the last one to keep
        has_k = None
        if self.top_k is not None:
            has_k = (self.top_k > 0) & (self.top_k <= count)
            last = torch.where(has_k, self.top_k - 1, last)
        if self.top_p is None or total is None:
            off = None if has_k is None else ~has_k
            found = candidates.gather(-1, last)
            return (found if off is None else found.masked_fill(off, float("-inf"))), True
        mass = candidates.exp()
        cumulated = mass.cumsum(dim=-1)
        if has_k is not None:  # top-p is a share of what top-k left
            total = torch.where(has_k, cumulated.gather(-1, last), total)
        kept = ((cumulated - mass) < self.top_p * total).sum(dim=-1, keepdim=True)  # those before it hold less than p
        is_open = self.top_p >= 1.0
        found = candidates.gather(-1, torch.minimum(kept.clamp_(min=1) - 1, last))
        if has_k is None:
            needs_more = (kept == count) & ~is_open
            return found.masked_fill(is_open, float("-inf")), not bool(needs_more.any())
        needs_more = (kept == count) & ~is_open & ~has_k
        return found.masked_fill(is_open & ~has_k, float("-inf")), not bool(needs_more.any())
