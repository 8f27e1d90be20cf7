"""State of one sequence inside the engine. Engine thread only."""

from __future__ import annotations

import enum
import itertools
import random
from bisect import bisect_right
from collections.abc import Collection
from operator import attrgetter

from ftserve.engine.media import MediaUnit, PromptMedia
from ftserve.engine.types import FinishReason, GenerationRequest, TokenLogprobs

_END = attrgetter("end")


class SequenceState(enum.Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"  # never scheduled, or preempted; holds no blocks
    RUNNING = "running"  # holds blocks, takes part in steps
    ENDED = "ended"  # finished, failed or cancelled; holds nothing


class Sequence:
    """Tokens of one request and how far they are computed.

    `token_ids` grows by one sampled token a step once `num_computed` has reached all but the last of them. After a
    preemption `num_computed` starts over and the sampled tokens are computed again like a prompt.

    Where the next step is queued before a step's tokens were read, the last token is `is_unread`: it exists on the
    device only, behind `token_ids`.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "blocks",
        "has_to_end",
        "is_unread",
        "max_len",
        "media",
        "media_end",
        "min_len",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "row",
        "seed",
        "slot",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        *,
        arrival: int,
        eos_ids: Collection[int] = (),
        max_model_len: int,
        media: PromptMedia | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival = arrival  # order among requests of one priority
        self.state = SequenceState.WAITING
        self.token_ids = list(request.prompt_ids)  # prompt, then output
        self.prompt_len = len(self.token_ids)
        self.max_len = min(self.prompt_len + sampling.max_tokens, max_model_len)
        self.min_len = self.prompt_len + sampling.min_tokens
        self.stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos or sampling.grammar is not None:  # behind a grammar's end nothing may follow
            self.stop_ids = self.stop_ids.union(eos_ids)
        self.seed = random.getrandbits(64) if sampling.seed is None else sampling.seed
        self.num_computed = 0  # tokens whose keys and values are in the cache
        self.num_cached = 0  # of the prompt: found in the prefix cache when first scheduled
        self.num_preemptions = 0
        # Of the prompt tokens seen so far, if they are wanted.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if sampling.num_prompt_logprobs is None else [None]
        )
        self.is_unread = False  # a token was sampled for it that `token_ids` lacks
        self.row = -1  # of that token among those of its step
        self.has_to_end = False  # its grammar allows nothing but an end
        self.blocks: list[int] = []  # cache blocks in the order of the tokens
        self.block_hashes: list[bytes] = []  # of the full blocks, as far as they were needed
        self.media = media
        self.media_end = media.units[-1].end if media is not None and media.units else 0  # past the last placeholder
        self.slot = -1  # row of the runner's per-sequence tables; -1 while it has none

    @property
    def key(self) -> tuple[int, int]:
        """Return the place in every order: who is smaller is served first and preempted last."""
        return (self.request.priority, self.arrival)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Return how many tokens are known and not computed; 1 when decoding, but 0 if the last one is unread."""
        return len(self.token_ids) - self.num_computed

    def units_between(self, start: int, end: int) -> list[MediaUnit]:
        """Return the media of which a placeholder lies in tokens `start` to `end`."""
        if self.media is None or start >= self.media_end:
            return []
        units = self.media.units
        first = bisect_right(units, start, key=_END)
        return list(itertools.takewhile(lambda unit: unit.start < end, units[first:]))

    @property
    def scores_prompt(self) -> bool:
        """Tell whether logits of all prompt tokens are needed, so that none may come from the prefix cache."""
        return self.prompt_logprobs is not None and len(self.token_ids) == self.prompt_len

    @property
    def must_go_on(self) -> bool:
        """Tell whether the next token may not be one that ends the sequence."""
        return len(self.token_ids) < self.min_len and bool(self.stop_ids) and not self.has_to_end

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token and tell whether it ends the sequence."""
        self.token_ids.append(token_id)
        length = len(self.token_ids)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_len else None
