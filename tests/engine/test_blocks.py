from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftserve.engine.blocks import NULL_BLOCK, BlockPool, hash_block


def test_blocks_are_given_away_once_and_never_the_null_block() -> None:
    pool = BlockPool(5, 16)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in blocks
    assert pool.num_free == 0
    pool.check([blocks])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(num_blocks, block_size)


def test_a_hash_depends_on_all_that_came_before() -> None:
    assert hash_block(b"", [1, 2]) == hash_block(b"", [1, 2])
    assert len({hash_block(parent, ids) for parent in (b"", b"a") for ids in ([1, 2], [2, 1], [1, 258])}) == 6


def test_a_released_block_stays_findable_until_it_is_given_away() -> None:
    pool = BlockPool(3, 2)
    kept, *others = pool.allocate(3)
    pool.publish(kept, b"name")
    pool.release([kept])
    pool.release(others)
    assert pool.find([b"name"]) == [kept]
    assert pool.allocate(2) != [kept]  # blocks without findable content go first
    assert pool.find([b"name"]) == [kept]
    assert pool.allocate(1) == [kept]
    assert pool.find([b"name"]) == []
    assert pool.statistics().evictions == 1


def test_the_least_recently_used_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in (*first, *second):
        pool.publish(block, str(block).encode())
    pool.release(first)
    pool.release(second)
    pool.hold(first)
    pool.release(first)
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]


def test_a_prefix_is_found_up_to_its_first_unknown_block() -> None:
    pool = BlockPool(4, 2)
    a, b, c = pool.allocate(3)
    pool.publish(a, b"a")
    pool.publish(c, b"c")
    assert pool.find([b"a", b"b", b"c"]) == [a]
    pool.check([[a, b, c]])


def test_of_two_blocks_with_one_content_the_first_is_known() -> None:
    pool = BlockPool(2, 2)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.release([second])
    assert pool.find([b"same"]) == [first]
    pool.check([[first]])


def test_shared_blocks_are_free_after_the_last_release() -> None:
    pool = BlockPool(1, 2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"name")
    pool.hold(pool.find([b"name"]))
    pool.release(blocks)
    assert pool.num_free == 0
    assert pool.num_free_among(blocks) == 0
    pool.release(blocks)
    assert pool.num_free_among(blocks) == pool.num_free == 1


def test_discarded_content_is_forgotten_unless_someone_else_holds_it() -> None:
    pool = BlockPool(2, 2)
    shared, own = pool.allocate(2)
    pool.publish(shared, b"shared")
    pool.publish(own, b"own")
    pool.hold([shared])
    assert pool.discard([shared, own]) == [own]
    assert pool.find([b"shared"]) == [shared]
    assert pool.find([b"own"]) == []


def test_check_names_a_leaked_block() -> None:
    pool = BlockPool(2, 2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 1: 1 references, 0 holders"):
        pool.check([])


class Pool(RuleBasedStateMachine):
    """Random holders over a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 2)
        self.holders: list[list[int]] = []
        self.named = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not set(blocks) & {block for holder in self.holders for block in holder}
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.publish(data.draw(st.sampled_from(holder)), str(name).encode())

    @rule(names=st.lists(st.integers(0, 5), unique=True))
    def share(self, names: list[int]) -> None:
        found = self.pool.find(str(name).encode() for name in names)
        assert self.pool.num_free_among(found) <= self.pool.num_free
        self.pool.hold(found)
        if found:
            self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if forget:
            self.pool.discard(holder)
        else:
            self.pool.release(holder)

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check(self.holders)
        assert self.pool.statistics().held + self.pool.num_free == self.pool.num_blocks


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
