"""What a sequence may not say at all: tokens that are not allowed, bad words, and what a grammar rules out.

Masks of grammars are made by threads of ours while the device works: `start` gives each some of the guides, `finish`
waits for them, and in between nobody else touches those; what they read of a sequence, its tokens, does not change
then. llguidance makes a mask in Rust, detached from the interpreter. All else is of the engine thread.

A mask is a row of bits, one a token, the first in the lowest bit; set means allowed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftserve.engine.errors import EngineRequestError, FtserveError, InvalidRequestError
from ftserve.engine.sequence import Sequence, SequenceState
from ftserve.engine.threads import name_this_thread
from ftserve.engine.transfer import upload
from ftserve.engine.types import SamplingParams

log = logging.getLogger("ftserve.engine")

# A mask takes 10 us in a JSON schema and 300 in the middle of a long alternative, and a GPU's step 8 ms.
_NUM_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
_LEAST_SHARE = 8  # sequences that are worth waking a thread for

# The whole batch waits for the slowest mask. A sequence that owes more CPU time than that, at so much a mask, is ended:
# an ambiguous grammar may take 40 ms for each mask, and more as the text grows.
_SECONDS_A_MASK = 0.01
_MOST_SECONDS_OWED = 0.5
_TOO_COMPLEX = "The structure that the request asks for is too complex to be followed."


class Constraints:
    """Applies the constraints of one batch after another."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._known: dict[int, Constrained] = {}  # of the batch, by arrival
        self._guides: list[Guide] = []
        self._applier = MaskApplier(vocab_size, device)
        self._minus_infinity = torch.full((), float("-inf"), device=device)
        self._pool: ThreadPoolExecutor | None = None  # made for the first grammar
        self._masks: list[Future[None]] = []

    @property
    def is_idle(self) -> bool:
        """Tell whether `apply` would change nothing."""
        return not self._known

    def describe(self, sequences: list[Sequence]) -> None:
        """Take the sequences of the next steps, in the order of the logits' rows."""
        rows = [(row, s) for row, s in enumerate(sequences) if _is_constrained(s.request.sampling)]
        if rows or self._known:
            self.wait()
            known = self._known
            self._known = {s.arrival: known.get(s.arrival) or Constrained(s, self._vocab_size) for _, s in rows}
            for (row, _), constrained in zip(rows, self._known.values(), strict=True):
                constrained.row = row
            self._guides = [c.guide for c in self._known.values() if c.guide is not None]

    def start(self) -> None:
        """Have the masks of grammars made for the tokens that come next, while the device works."""
        if self._guides:
            self.wait()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    _NUM_THREADS, "ftserve-masks", initializer=name_this_thread, initargs=("ft-masks",)
                )
            share = max(_LEAST_SHARE, -(-len(self._guides) // _NUM_THREADS))
            for begin in range(0, len(self._guides), share):
                self._masks.append(self._pool.submit(_make_masks, self._guides[begin : begin + share]))

    def wait(self) -> None:
        """Wait for the masks that `start` asked for."""
        for masks in self._masks:
            masks.result()
        self._masks.clear()

    def finish(self) -> None:
        """See that there are masks for the next tokens; the sequences know then whether they have to end."""
        if self._guides and not self._masks:
            _make_masks(self._guides)
        self.wait()

    def apply(self, logits: Tensor) -> None:
        """Set to -inf what may not be said, in float32 `logits` [S, vocabulary]. After `finish`."""
        rows, masks, banned = [], [], []
        for constrained in self._known.values():
            mask = constrained.mask()
            if mask is not None:
                rows.append(constrained.row)
                masks.append(mask)
            banned += [(constrained.row, token_id) for token_id in constrained.banned()]
        if rows:
            self._applier.apply(logits, rows, masks)
        if banned:
            rows_of, ids = upload(np.array(banned, np.int64).T.copy(), self._device)
            logits.index_put_((rows_of, ids), self._minus_infinity)

    def failure(self, row: int) -> FtserveError | None:
        """Return why a sequence got no token, as far as its constraints are the reason."""
        for constrained in self._known.values():
            if constrained.row == row:
                return constrained.failure()
        return None

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()


def _is_constrained(sampling: SamplingParams) -> bool:
    return bool(sampling.allowed_token_ids or sampling.bad_words) or sampling.grammar is not None


def _make_masks(guides: list[Guide]) -> None:
    for guide in guides:
        guide.advance()


class Constrained:
    """The constraints of one sequence."""

    __slots__ = ("_phrases", "_sequence", "_standing", "guide", "row")

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        sampling = sequence.request.sampling
        self.row = 0  # of the batch's logits
        self.guide = None if sampling.grammar is None else Guide(sequence)
        self._sequence = sequence
        self._standing = _standing_mask(sampling, vocab_size)
        # By the last token of what has to come before: (all of that, the token that may not follow).
        self._phrases: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in sampling.bad_words:
            if before:
                self._phrases.setdefault(before[-1], []).append((before, last))

    def mask(self) -> np.ndarray | None:
        """Return the bits for the next token, uint8; None if all are allowed."""
        guide, standing = self.guide, self._standing
        if guide is None or not guide.is_active:
            return standing
        return guide.mask if standing is None else guide.mask[: len(standing)] & standing

    def banned(self) -> list[int]:
        """Return the tokens that would complete a bad word now."""
        if not self._phrases or not self._sequence.output_len:
            return []
        token_ids, prompt_len = self._sequence.token_ids, self._sequence.prompt_len
        return [
            last
            for before, last in self._phrases.get(token_ids[-1], ())
            if len(before) <= len(token_ids) - prompt_len and token_ids[-len(before) :] == before
        ]

    def failure(self) -> FtserveError:
        if self.guide is not None and self.guide.error is not None:
            return self.guide.error
        return InvalidRequestError("The constraints of this request have left no token that may come next.")


def _standing_mask(sampling: SamplingParams, vocab_size: int) -> np.ndarray | None:
    """Return the bits that do not change from token to token, uint8; None if all are set."""
    single = [word[0] for word in sampling.bad_words if len(word) == 1]
    if not sampling.allowed_token_ids and not single:
        return None
    allowed = np.full(-(-vocab_size // 32) * 32, not sampling.allowed_token_ids)
    allowed[_known_ids(sampling.allowed_token_ids, vocab_size)] = True
    allowed[_known_ids(single, vocab_size)] = False
    return np.packbits(allowed, bitorder="little")


def _known_ids(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


class Guide:
    """Where one sequence stands in its grammar. Used by a mask thread while masks are made, else by the engine's."""

    __slots__ = ("_grammar", "_matcher", "_owed_s", "_position", "_sequence", "error", "is_active", "mask")

    def __init__(self, sequence: Sequence) -> None:
        grammar = sequence.request.sampling.grammar
        assert grammar is not None, "made for sequences that have one"
        self.mask = np.zeros(-(-grammar.vocab_size // 32) * 4, np.uint8)
        self.error: FtserveError | None = None
        self.is_active = not sequence.request.sampling.grammar_after
        self._sequence = sequence
        self._grammar = grammar
        self._matcher: Any = None  # a copy of the grammar's, made by a mask thread: it may take milliseconds
        self._owed_s = 0.0
        self._position = sequence.prompt_len  # tokens before it are behind us

    def advance(self) -> None:
        """Follow the tokens that came since the last time and make the mask for the next; nothing is raised."""
        if self.error is not None or self._sequence.state is SequenceState.ENDED:
            return
        began = time.thread_time()
        try:
            if self._is_reached():
                self._follow()
        except Exception as exc:  # noqa: BLE001 - whatever a matcher raises ends this request alone
            self._fail(str(exc), EngineRequestError("The output could not be kept to its structure."))
        self._owed_s = max(0.0, self._owed_s + time.thread_time() - began - _SECONDS_A_MASK)
        if self._owed_s > _MOST_SECONDS_OWED and self.error is None:
            self._fail("it takes too long", InvalidRequestError(_TOO_COMPLEX))

    def _is_reached(self) -> bool:
        """Tell whether the grammar has begun; until then every token is free."""
        if self.is_active:
            return True
        opening, token_ids = list(self._sequence.request.sampling.grammar_after), self._sequence.token_ids
        length = len(opening)
        for end in range(max(self._position, self._sequence.prompt_len + length), len(token_ids) + 1):
            if token_ids[end - length : end] == opening:
                self.is_active, self._position = True, end
                return True
        self._position = len(token_ids) + 1
        return False

    def _follow(self) -> None:
        if self._matcher is None:
            self._matcher = self._grammar.matcher.deep_copy()
        matcher, token_ids = self._matcher, self._sequence.token_ids
        if self._position < len(token_ids):
            matcher.consume_tokens(token_ids[self._position :])
            self._position = len(token_ids)
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self._sequence.has_to_end = matcher.is_stopped()
        if matcher.is_error():  # it ran into one of its limits
            self._fail(matcher.get_error(), InvalidRequestError(_TOO_COMPLEX))

    def _fail(self, message: str, error: FtserveError) -> None:
        """Note the error, and allow nothing, so that the request ends with it."""
        log.warning("request %s: its grammar failed: %s", self._sequence.request.request_id, message[:500])
        self.error = error
        self.is_active = True
        self.mask.fill(0)


class MaskApplier:
    """Sets logits to -inf by rows of bits."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # On the CPU each byte of a mask is looked up: eight numbers to add. 0.4 ms for 32 rows of 49152, where
        # unpacking and filling takes 15.
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._addends = np.where(bits == 0, np.float32("-inf"), np.float32(0))
        self._addend = np.empty((-(-vocab_size // 8), 8), np.float32)
        self._shifts = torch.arange(8, dtype=torch.uint8, device=device)

    def apply(self, logits: Tensor, rows: list[int], masks: list[np.ndarray]) -> None:
        """Change `rows` of float32 `logits` [S, vocabulary] by the bits of `masks`, uint8, at least as many."""
        masks = [mask[: len(self._addend)] for mask in masks]
        if self._device.type == "cpu":
            self._add(logits.numpy(), rows, masks)
        else:
            self._fill(logits, rows, masks)

    def _add(self, logits: np.ndarray, rows: list[int], masks: list[np.ndarray]) -> None:
        addend = self._addend.reshape(-1)[: self._vocab_size]
        for row, mask in zip(rows, masks, strict=True):
            np.take(self._addends, mask, axis=0, out=self._addend, mode="clip")
            np.add(logits[row], addend, out=logits[row])

    def _fill(self, logits: Tensor, rows: list[int], masks: list[np.ndarray]) -> None:
        packed = upload(np.stack(masks), self._device)
        is_allowed = ((packed[:, :, None] >> self._shifts) & 1).flatten(1)[:, : self._vocab_size] != 0
        index = upload(np.array(rows, np.int64), self._device)
        logits[index] = logits[index].masked_fill(~is_allowed, float("-inf"))
