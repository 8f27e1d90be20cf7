"""Blocks of the KV cache: who holds which, and which still hold the keys and values of a known prefix.

A block is room for `block_size` consecutive tokens of one sequence, in every layer. Blocks are counted by reference,
because sequences with the same prefix share them. A full block whose content is known by its hash stays findable after
its last holder let go, until it is the least recently used of the free ones and is given away.

Engine thread only. No torch: a block is a number here.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

# Keys the hash of this process: nobody outside can look for prompts that collide.
_HASH_KEY = secrets.token_bytes(16)

BLOCK_SIZE = 16  # tokens; a smaller one wastes less and shares more, a larger one has shorter tables
NULL_BLOCK = 0  # never given away and always zero: pads block tables


def hash_block(parent: bytes, token_ids: Sequence[int], media: bytes = b"") -> bytes:
    """Return the name of a full block: it depends on its tokens and, through `parent`, on all before them.

    `media` says what the placeholders among the tokens stand for.
    """
    return blake2b(parent + array("q", token_ids).tobytes() + media, digest_size=16, key=_HASH_KEY).digest()


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Counts of blocks, and of the prefix cache since the start."""

    total: int  # that can be given away
    held: int  # by at least one sequence
    cached: int  # free, with findable content
    hits: int  # blocks found by hash
    evictions: int  # findable blocks that were given away


class BlockPool:
    """All blocks of one device, numbered from 1; block 0 is the null block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Make a pool that can give away `num_blocks` blocks of `block_size` tokens."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[bytes, int] = {}
        # Free blocks, the next to be given away first. Ordered, so that a block in the middle can be revived.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._hits = self._evictions = 0

    @property
    def num_free(self) -> int:
        """Return how many blocks `allocate` could give away now."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Give away `count` blocks with unknown content, each held once. The caller has looked at `num_free`."""
        return [self._take_oldest() for _ in range(count)]

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        known = self._hashes[block]
        if known is not None:
            self._hashes[block] = None
            del self._by_hash[known]
            self._evictions += 1

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `hashes`, without holding them."""
        found: list[int] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are held by nobody, so that holding them takes from `num_free`."""
        return sum(self._references[block] == 0 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block that `find` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        self._hits += len(blocks)

    def publish(self, block: int, name: bytes) -> None:
        """Make a full, computed block findable. Of two blocks with the same content the first stays the known one."""
        if name not in self._by_hash and self._hashes[block] is None:
            self._hashes[block] = name
            self._by_hash[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The end of a sequence is given away before its beginning."""
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:  # nothing to find in it: give it away first
                    self._free.move_to_end(block, last=False)

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference to each block and forget the content of those that nobody holds any more.

        Returns:
            The forgotten ones. The caller makes them harmless before the next step.
        """
        self.release(blocks)
        gone = [block for block in blocks if self._references[block] == 0]
        for block in gone:
            self._forget(block)
        return gone

    def statistics(self) -> BlockStatistics:
        free = len(self._free)
        cached = sum(1 for block in self._by_hash.values() if self._references[block] == 0)
        return BlockStatistics(self.num_blocks, self.num_blocks - free, cached, self._hits, self._evictions)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the books with who really holds blocks.

        Raises:
            AssertionError: a block leaked, is shared wrongly, or is free and held; the message names it.
        """
        expected = [0] * (self.num_blocks + 1)
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        for block in range(1, self.num_blocks + 1):
            counted = self._references[block]
            assert counted == expected[block], f"block {block}: {counted} references, {expected[block]} holders"
            assert (block in self._free) == (counted == 0), f"block {block}: {counted} references, free wrongly"
            name = self._hashes[block]
            assert name is None or self._by_hash[name] == block, f"block {block}: not found by its hash"
        assert expected[NULL_BLOCK] == 0, f"the null block is held {expected[NULL_BLOCK]} times"
        assert NULL_BLOCK not in self._free, "the null block is free"
        assert len(self._by_hash) == sum(name is not None for name in self._hashes), "a hash leads nowhere"
