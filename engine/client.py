"""The engine as the rest of the program sees it: submit, cancel, stats, close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ftserve.engine.errors import EngineDeadError
from ftserve.engine.loop import Command, CommandKind, EngineLoop, EngineState, EngineStats, EventSink
from ftserve.engine.stepper import Stepper
from ftserve.engine.types import GenerationRequest


class EngineClient:
    """An engine on a thread of this process. Every method may be called from any thread."""

    def __init__(self, make_stepper: Callable[[], Stepper], sinks: Sequence[EventSink]) -> None:
        """Prepare the engine; `make_stepper` is called on the engine's own thread."""
        self.loop = EngineLoop(make_stepper, sinks)
        self._thread = threading.Thread(target=self.loop.run, name="ftserve-engine", daemon=True)

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

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every live request with a final event and stop the thread; False if it has not ended in time."""
        self.loop.inbox.put(Command(CommandKind.CLOSE, None))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
