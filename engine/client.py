"""The engine as the rest of the program sees it: submit, cancel, stats, close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ftserve.engine.errors import EngineDeadError
from ftserve.engine.histogram import Histogram
from ftserve.engine.loop import Command, CommandKind, EngineLoop, EngineState, EngineStats, EventSink
from ftserve.engine.stepper import Stepper
from ftserve.engine.types import GenerationRequest


class Engine(Protocol):
    """What the rest of the program needs of an engine. Every method may be called from any thread."""

    @property
    def state(self) -> EngineState:
        """Where it stands."""

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine died, if it did."""

    @property
    def description(self) -> dict[str, str]:
        """What the start-up line says of it, once loaded."""

    def start(self) -> None:
        """Start loading; returns at once."""

    def wait_loaded(self, timeout_s: float | None = None) -> bool:
        """Wait until loading has ended, well or not; False after `timeout_s`.

        Raises:
            EngineDeadError: the engine could not be started.
        """

    def place(self, prompt_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Return the `replica` of a request with this prompt."""

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request over. Its lane receives its events from now on, the last one with a finish reason."""

    def cancel(self, request: GenerationRequest) -> None:
        """Ask for the end of a request. Its final event says CANCELLED, unless it had ended before."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""

    def step_seconds(self) -> Histogram:
        """Return the durations of the steps so far."""

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every live request with a final event, and stop; False if it has not ended in time."""


class EngineClient:
    """An `Engine` on a thread of this process."""

    def __init__(self, make_stepper: Callable[[], Stepper], sinks: Sequence[EventSink], *, replica: int = 0) -> None:
        """Prepare the engine; `make_stepper` is called on the engine's own thread. `sinks` are its own, one a lane."""
        self.loop = EngineLoop(make_stepper, sinks, thread_name=f"ft-engine-{replica}" if replica else "ft-engine")
        self._thread = threading.Thread(target=self.loop.run, name=f"ftserve-engine-{replica}", daemon=True)

    def start(self) -> None:
        """Start loading; returns at once."""
        self._thread.start()

    def wait_loaded(self, timeout_s: float | None = None) -> bool:
        """Wait until loading has ended, well or not; False after `timeout_s`.

        Raises:
            EngineDeadError: the engine could not be started.
        """
        loaded = self.loop.loaded.wait(timeout_s)
        if self.loop.death is not None:
            raise self.loop.death
        return loaded

    @property
    def state(self) -> EngineState:
        return self.loop.state

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine died, if it did."""
        return self.loop.death

    @property
    def description(self) -> dict[str, str]:
        """Return what the start-up line says, once loaded."""
        return self.loop.description

    def step_seconds(self) -> Histogram:
        """Return the durations of the steps so far."""
        return self.loop.step_seconds

    def place(self, prompt_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Return which engine a request with this prompt should go to: here, the only one."""
        return 0

    def submit(self, request: GenerationRequest) -> None:
        """Hand a request over. Its lane receives its events from now on, the last one with a finish reason.

        A cancel that came before is not remembered. Who may be cancelled while preparing a request sets a flag
        first, then cancels; the submitter reads the flag after this call (a full fence) and cancels if it is set.
        """
        self.loop.inbox.put(Command(CommandKind.SUBMIT, request))

    def cancel(self, request: GenerationRequest) -> None:
        """Ask for the end of a request. Its final event says CANCELLED, unless it had ended before."""
        self.loop.inbox.put(Command(CommandKind.CANCEL, request))

    def stats(self) -> EngineStats:
        return self.loop.stats()

    def stop(self) -> None:
        """Begin to end every live request with a final event, and the thread with them; returns at once."""
        self.loop.inbox.put(Command(CommandKind.CLOSE, None))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop, and wait until the thread has ended; False if it has not in time."""
        self.stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
