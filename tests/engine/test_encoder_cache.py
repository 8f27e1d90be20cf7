from __future__ import annotations

import random
from typing import Any

from ftserve.engine.encoder_cache import EncoderCache
from ftserve.engine.media import MediaUnit


def unit(name: str, tokens: int) -> MediaUnit:
    item: Any = None  # the books look at no pixel
    return MediaUnit(name.encode(), 0, tokens, item, 0)


class Steps:
    """A cache, and what its steps decided."""

    def __init__(self, capacity: int, budget: int) -> None:
        self.cache = EncoderCache(capacity, max_tokens_per_step=budget)

    def step(self, *units: MediaUnit) -> tuple[list[bool], list[bytes], list[bytes]]:
        """Take units in a new step; return which are had, what is to encode and what to drop."""
        encodes: list[MediaUnit] = []
        drops: list[bytes] = []
        self.cache.begin_step(encodes, drops)
        had = [self.cache.take(unit, is_first_use=True) for unit in units]
        return had, [unit.name for unit in encodes], drops


def test_a_unit_is_encoded_once() -> None:
    steps = Steps(10, 10)
    assert steps.step(unit("a", 4), unit("a", 4)) == ([True, True], [b"a"], [])
    assert steps.step(unit("a", 4)) == ([True], [], [])
    assert (steps.cache.statistics().encoded, steps.cache.statistics().hits) == (1, 2)


def test_a_step_encodes_up_to_its_bound_or_one_unit() -> None:
    steps = Steps(100, 10)
    assert steps.step(unit("a", 6), unit("b", 4), unit("c", 1)) == ([True, True, False], [b"a", b"b"], [])
    assert steps.step(unit("large", 50), unit("c", 1)) == ([True, False], [b"large"], [])


def test_the_least_recently_used_goes_first_and_what_the_step_uses_stays() -> None:
    steps = Steps(10, 100)
    steps.step(unit("a", 4), unit("b", 4))
    assert steps.step(unit("a", 4), unit("c", 4)) == ([True, True], [b"c"], [b"b"])
    assert steps.step(unit("c", 4), unit("a", 4), unit("d", 4)) == ([True, True, False], [], [])
    assert steps.step(unit("d", 10)) == ([True], [b"d"], [b"c", b"a"])


def test_what_failed_is_encoded_again() -> None:
    steps = Steps(10, 10)
    steps.step(unit("a", 4))
    steps.cache.forget([unit("a", 4)])
    assert steps.cache.statistics().held_tokens == 0
    assert steps.step(unit("a", 4)) == ([True], [b"a"], [])


def test_random_steps_keep_the_bounds_and_always_serve_the_first() -> None:
    rng = random.Random(1)
    sizes = {str(number): rng.randint(1, 12) for number in range(20)}
    steps, kept = Steps(30, 8), set[bytes]()
    for _ in range(2000):
        units = [unit(name, sizes[name]) for name in rng.sample(list(sizes), rng.randint(1, 6))]
        had, encoded, dropped = steps.step(*units)
        kept = kept - set(dropped) | set(encoded)
        assert had[0]
        assert all((unit.name in kept) for unit, is_had in zip(units, had, strict=True) if is_had)
        spent = sum(sizes[name.decode()] for name in encoded)
        assert spent <= 8 or len(encoded) == 1
        assert steps.cache.statistics().held_tokens == sum(sizes[name.decode()] for name in kept) <= 30
