"""Several engines, one a device, behind the interface of one.

A request goes where a prefix of its prompt was computed before, since there it is likely in the prefix cache, unless
that engine is clearly busier than another; else to the one with the least to do. An engine that dies takes its
requests with it and gets no more; the others go on.

Shared fields, under one lock that is taken twice a request and never per token: `_num_submitted` and `_homes`. What an
engine has ended is counted by its own thread; a value that is one step old only makes the choice less good.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from ftserve.engine.client import EngineClient
from ftserve.engine.errors import EngineDeadError
from ftserve.engine.histogram import Histogram
from ftserve.engine.loop import EngineState, EngineStats
from ftserve.engine.types import GenerationRequest

_SHORTEST_PREFIX = 64  # tokens; less is not worth a detour
_MAX_PREFIXES = 65_536  # remembered, in all
_SLACK = 4  # sequences that a home may have more than the least busy engine, ...
_SLACK_SHARE = 1.5  # ... or times as many


class EngineRouter:
    """An `Engine` made of several that serve the same model."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = tuple(engines)
        self._lock = threading.Lock()
        self._num_submitted = [0] * len(self.engines)
        self._homes: OrderedDict[bytes, int] = OrderedDict()  # digest of a prefix: the engine that has computed it

    def start(self) -> None:
        """Start loading; returns at once."""
        for engine in self.engines:
            engine.start()

    def wait_loaded(self, timeout_s: float | None = None) -> bool:
        """Wait until loading has ended everywhere, well or not; False after `timeout_s`.

        Raises:
            EngineDeadError: an engine could not be started.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return all(
            engine.wait_loaded(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for engine in self.engines
        )

    @property
    def state(self) -> EngineState:
        """LOADING while any engine loads, then READY as long as one can serve."""
        states = {engine.state for engine in self.engines}
        return next(state for state in EngineState if state in states)

    @property
    def death(self) -> EngineDeadError | None:
        """Why nothing can be served any more, if so."""
        deaths = [engine.death for engine in self.engines]
        return None if None in deaths else deaths[0]

    @property
    def description(self) -> dict[str, str]:
        """Return what the start-up line says, of all engines."""
        parts = [engine.description for engine in self.engines]
        return parts[0] | {name: " + ".join(part[name] for part in parts) for name in ("device", "kv_capacity_tokens")}

    def step_seconds(self) -> Histogram:
        """Return the durations of all engines' steps so far."""
        return Histogram.sum(engine.step_seconds() for engine in self.engines)

    def place(self, prompt_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Return the index of the engine that a request with this prompt should go to: its `replica`."""
        digests = prefix_digests(prompt_ids, cache_salt)
        with self._lock:
            loads = self._loads()
            least = min(loads)
            limit = max(least + _SLACK, least * _SLACK_SHARE)
            choice = loads.index(least)
            for digest in reversed(digests):
                home = self._homes.get(digest)
                if home is not None and loads[home] <= limit:
                    choice = home
                    break
            for digest in digests:
                self._homes[digest] = choice
                self._homes.move_to_end(digest)
            while len(self._homes) > _MAX_PREFIXES:
                self._homes.popitem(last=False)
        return choice

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request over to its replica; see `EngineClient.submit`."""
        with self._lock:
            self._num_submitted[request.replica] += 1
        self.engines[request.replica].submit(request)

    def cancel(self, request: GenerationRequest) -> None:
        """Ask for the end of a request; see `EngineClient.cancel`."""
        self.engines[request.replica].cancel(request)

    def stats(self) -> EngineStats:
        """Return counts summed over the engines, the mean usage of their caches and the oldest step."""
        parts = [engine.stats() for engine in self.engines]
        return EngineStats(
            state=self.state,
            num_running=sum(part.num_running for part in parts),
            num_waiting=sum(part.num_waiting for part in parts),
            num_live=sum(part.num_live for part in parts),
            num_ended=sum(part.num_ended for part in parts),
            kv_usage=sum(part.kv_usage for part in parts) / len(parts),
            steps=sum(part.steps for part in parts),
            generated_tokens=sum(part.generated_tokens for part in parts),
            step_age_s=max(part.step_age_s for part in parts),
            device_busy_s=sum(part.device_busy_s for part in parts),
            device_idle_s=sum(part.device_idle_s for part in parts),
        )

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every live request with a final event and stop the threads; False if one has not ended in time."""
        deadline = time.monotonic() + timeout_s
        for engine in self.engines:
            engine.stop()
        have_ended = [engine.close(max(0.0, deadline - time.monotonic())) for engine in self.engines]
        return all(have_ended)

    def _loads(self) -> list[float]:
        """Return how many sequences each engine has to do with; infinite for those that can do nothing."""
        return [
            submitted - engine.stats().num_ended if engine.death is None else float("inf")
            for submitted, engine in zip(self._num_submitted, self.engines, strict=True)
        ]


def prefix_digests(prompt_ids: Sequence[int], cache_salt: bytes) -> list[bytes]:
    """Return digests of the prefixes of 64, 128, 256 ... tokens, shortest first."""
    digests = []
    ids = memoryview(array("Q", prompt_ids[: _largest_prefix(len(prompt_ids))]))
    running, start, end = hashlib.blake2b(cache_salt, digest_size=16), 0, _SHORTEST_PREFIX
    while end <= len(ids):
        running.update(ids[start:end])
        digests.append(running.copy().digest())
        start, end = end, 2 * end
    return digests


def _largest_prefix(length: int) -> int:
    """Return the largest of 64, 128, 256 ... that is not more than `length`; 0 if there is none."""
    return 0 if length < _SHORTEST_PREFIX else _SHORTEST_PREFIX << (length // _SHORTEST_PREFIX).bit_length() - 1
