"""When the requests of an open loop start, in seconds since its beginning: they do not wait for each other."""

from __future__ import annotations

import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "constant", "bursts")


def arrival_times(kind: str, rate: float, *, burst_size: int = 10, rng: random.Random) -> Iterator[float]:
    """Yield ascending times without an end, `rate` of them a second on average.

    Bursts are `burst_size` requests at one moment; the moments are a Poisson process.
    """
    now = 0.0
    while True:
        if kind == "constant":
            yield now
            now += 1.0 / rate
        elif kind == "poisson":
            now += rng.expovariate(rate)
            yield now
        else:
            now += rng.expovariate(rate / burst_size)
            for _ in range(burst_size):
                yield now
