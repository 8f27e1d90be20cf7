"""Which outputs of the vision tower are kept, and what each step may encode. Engine thread only. No torch.

The books of the cache; the embeddings themselves are the runner's, which a `StepPlan` tells what to encode and what to
drop. What a step uses stays through that step. Between steps the least recently used goes first, so an image that is
half computed is dropped only when those before it in the scheduler's order need all the room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ftserve.engine.media import MediaUnit


@dataclass(frozen=True, slots=True)
class EncoderStatistics:
    """Tokens that are held now, and counts of units since the start."""

    held_tokens: int
    encoded: int
    hits: int  # found when a sequence came to them
    evictions: int


class EncoderCache:
    """Units by name, bounded in tokens."""

    def __init__(self, capacity: int, *, max_tokens_per_step: int) -> None:
        """Hold at most `capacity` tokens, and encode as many a step as given, or one unit that is larger.

        The bound on a step keeps running streams from waiting for more than that when many images come at once.
        """
        self.capacity = capacity
        self._max_tokens_per_step = max_tokens_per_step
        self._entries: OrderedDict[bytes, int] = OrderedDict()  # name: tokens; least recently used first
        self._held = 0
        self._in_step: set[bytes] = set()
        self._encodes: list[MediaUnit] = []
        self._drops: list[bytes] = []
        self._num_encoded = self._hits = self._evictions = 0

    def begin_step(self, encodes: list[MediaUnit], drops: list[bytes]) -> None:
        """Write what `take` decides into these lists from now on."""
        self._encodes, self._drops = encodes, drops
        self._in_step.clear()

    def take(self, unit: MediaUnit, *, is_first_use: bool) -> bool:
        """Make sure that the step has the embeddings of `unit`; False if they have to wait."""
        entries, name, tokens = self._entries, unit.name, unit.num_tokens
        if name in entries:
            entries.move_to_end(name)
            self._in_step.add(name)
            self._hits += is_first_use
            return True
        if self._encodes and self._encoded_now() + tokens > self._max_tokens_per_step:
            return False
        if not self._make_room(tokens):
            return False
        entries[name] = tokens
        self._held += tokens
        self._in_step.add(name)
        self._encodes.append(unit)
        self._num_encoded += 1
        return True

    def _encoded_now(self) -> int:
        return sum(unit.num_tokens for unit in self._encodes)

    def _make_room(self, tokens: int) -> bool:
        while self._held + tokens > self.capacity:
            oldest = next(iter(self._entries), None)
            if oldest is None or oldest in self._in_step:  # the step's own were all used after the others
                return False
            self._held -= self._entries.pop(oldest)
            self._drops.append(oldest)
            self._evictions += 1
        return True

    def forget(self, units: Iterable[MediaUnit]) -> None:
        """Drop units whose encoding failed."""
        for unit in units:
            self._held -= self._entries.pop(unit.name, 0)

    def statistics(self) -> EncoderStatistics:
        return EncoderStatistics(self._held, self._num_encoded, self._hits, self._evictions)
