"""What the engine thread drives: something that holds sequences and advances all of them by one step."""

from __future__ import annotations

from typing import Protocol

from ftserve.engine.types import GenerationRequest, TokenEvent


class Stepper(Protocol):
    """A scheduler and the device behind it. Made, called and closed on the engine thread only.

    For each request that `add` accepts, the events of later `step` calls hold its tokens in order and, exactly
    once and last, a finish reason — unless `cancel` took it first.
    """

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            FtserveError: this request can never be served; nothing was kept of it.
        """

    def cancel(self, request: GenerationRequest) -> None:
        """Forget a request that was added and has not finished; its memory is free when this returns."""

    def step(self) -> list[TokenEvent]:
        """Advance by one step and return its news, in the order of the sequences; may be empty.

        A failure that concerns one request is an event of that request; what is raised here is fatal for all.
        """

    def num_running(self) -> int:
        """Return how many sequences hold memory on the device."""

    def num_waiting(self) -> int:
        """Return how many were added and were not scheduled yet, or were preempted."""

    def kv_usage(self) -> float:
        """Return the used share of the KV cache, 0 to 1."""

    def device_seconds(self) -> float:
        """Return how long the device has worked since the start; the rest of the time it waited for us."""

    def describe(self) -> dict[str, str]:
        """Return what the start-up line says: device, dtype, kv_capacity_tokens."""

    def close(self) -> None:
        """Release the device."""
