"""The engine thread: take commands, step, hand out events, until told to close.

Guarantees:
    - Every request taken from the inbox gets exactly one final event, whatever happens: finish, cancel, refusal,
      deadline, death of the engine, close.
    - Events of one sequence reach their lane in order; one list a step and lane.
    - A parked thread costs nothing: with no live request it sleeps in the inbox.

Assumptions:
    - `inbox` has no other consumer. Only this thread touches the stepper.
    - Nobody submits after `CommandKind.CLOSE` was put (the service stops its producers first).

Shared fields: `state`, `death`, and the counters are written by this thread only; others read a value that may be
one step old. A list or dict is never shared.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ftserve.engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineRequestError,
    FtserveError,
    RequestCancelledError,
)
from ftserve.engine.histogram import Histogram
from ftserve.engine.inbox import Inbox, make_inbox
from ftserve.engine.stepper import Stepper
from ftserve.engine.threads import name_this_thread
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent

log = logging.getLogger("ftserve.engine")

MAX_LAG_BATCHES = 64  # steps that an output thread may be behind before the engine waits for it
LAG_PAUSE_S = 0.0002
_EXPIRY_INTERVAL_S = 0.05  # how often the deadlines of live requests are looked at


class CommandKind(enum.Enum):
    SUBMIT = enum.auto()
    CANCEL = enum.auto()
    CLOSE = enum.auto()  # `request` is None; ends the thread


class Command(NamedTuple):
    kind: CommandKind
    request: GenerationRequest | None


class EventSink(Protocol):
    """Where one lane's events go; an output thread."""

    def put(self, batch: list[TokenEvent]) -> None:
        """Take ownership of one step's events. Engine thread; never blocks."""

    def lag(self) -> int:
        """Return how many batches were put and not yet handled."""


class EngineState(enum.Enum):
    LOADING = "loading"  # the stepper is being made
    READY = "ready"
    DEAD = "dead"  # failed for good; each request is answered with an error at once
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at the engine; fields may be one step apart."""

    state: EngineState
    num_running: int
    num_waiting: int
    num_live: int  # accepted and without a final event
    num_ended: int  # got their final event
    kv_usage: float  # 0 to 1
    steps: int
    generated_tokens: int
    step_age_s: float  # since the last step or park began; large means stuck
    device_busy_s: float  # since loaded: how long the device worked, and how long it waited for work
    device_idle_s: float


class EngineLoop:
    """Body and state of the engine thread."""

    def __init__(
        self, make_stepper: Callable[[], Stepper], sinks: Sequence[EventSink], *, thread_name: str = "ft-engine"
    ) -> None:
        self.inbox: Inbox[Command] = make_inbox()
        self.state = EngineState.LOADING
        self.death: EngineDeadError | None = None
        self.loaded = threading.Event()  # set when the state leaves LOADING
        self.native_id = 0
        self.description: dict[str, str] = {}
        self.steps = self.generated_tokens = 0
        self.num_live = self.num_running = self.num_waiting = self.num_ended = 0
        self.kv_usage = self.device_busy_s = 0.0
        self.loaded_at = 0.0  # time.monotonic()
        self.step_started = 0.0  # 0.0 while parked
        self.step_seconds = Histogram.exponential(0.0005, 2.0, 15)
        self._thread_name = thread_name
        self._make_stepper = make_stepper
        self._sinks = tuple(sinks)
        self._live: set[GenerationRequest] = set()
        self._next_expiry = 0.0

    def run(self) -> None:
        """Serve until closed. The thread's target."""
        self.native_id = name_this_thread(self._thread_name)
        try:
            stepper = self._make_stepper()
            self.description = stepper.describe()
            self.loaded_at = time.monotonic()
            self._enter(EngineState.READY)
            try:
                self._serve(stepper)
            finally:
                stepper.close()
        except BaseException as exc:
            # While loading, whoever waits for it reports the cause.
            log.log(logging.DEBUG if self.state is EngineState.LOADING else logging.ERROR, "died", exc_info=exc)
            self._mourn(exc)
        self._enter(EngineState.CLOSED)

    def stats(self) -> EngineStats:
        """Return a snapshot. Any thread."""
        began, busy, now = self.step_started, self.device_busy_s, time.monotonic()
        return EngineStats(
            state=self.state,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_live=self.num_live,
            num_ended=self.num_ended,
            kv_usage=self.kv_usage,
            steps=self.steps,
            generated_tokens=self.generated_tokens,
            step_age_s=now - began if began else 0.0,
            device_busy_s=busy,
            device_idle_s=max(0.0, now - self.loaded_at - busy) if self.loaded_at else 0.0,
        )

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self.loaded.set()

    def _serve(self, stepper: Stepper) -> None:
        while True:
            commands = self.inbox.drain() if self._live else self._park()
            events = self._obey(stepper, commands)
            if events is None:
                return
            if self._live:
                events += self._expire(stepper)
                events += self._step(stepper)
            self._emit(events)
            self.num_live = len(self._live)
            self.num_running, self.num_waiting = stepper.num_running(), stepper.num_waiting()
            self.kv_usage, self.device_busy_s = stepper.kv_usage(), stepper.device_seconds()

    def _park(self) -> list[Command]:
        self.step_started = 0.0
        return self.inbox.wait()

    def _obey(self, stepper: Stepper, commands: list[Command]) -> list[TokenEvent] | None:
        """Apply commands in order and return the events they cause; None after CLOSE, with everything ended."""
        events: list[TokenEvent] = []
        for kind, request in commands:
            if request is None:
                self._emit(events)
                self._end_all(RequestCancelledError("The server is stopping."))
                return None
            if kind is CommandKind.SUBMIT:
                events += self._admit(stepper, request)
            elif request in self._live:  # else it has ended already, or is yet to come: then it is cancelled there
                stepper.cancel(request)
                events.append(self._end(request, FinishReason.CANCELLED))
        return events

    def _admit(self, stepper: Stepper, request: GenerationRequest) -> list[TokenEvent]:
        request.times.admitted = time.monotonic()
        self._live.add(request)
        try:
            stepper.add(request)
        except FtserveError as exc:
            return [self._end(request, FinishReason.ERROR, exc)]
        except Exception as exc:  # a bug that one request hit; the engine outlives it
            log.exception("request %s could not be added", request.request_id)
            error = EngineRequestError("The engine could not take this request.")
            error.__cause__ = exc
            return [self._end(request, FinishReason.ERROR, error)]
        return []

    def _expire(self, stepper: Stepper) -> list[TokenEvent]:
        now = time.monotonic()
        if now < self._next_expiry:
            return []
        self._next_expiry = now + _EXPIRY_INTERVAL_S
        late = [r for r in self._live if r.is_expired(now)]
        for request in late:
            stepper.cancel(request)
        error = DeadlineExceededError("The request was not finished by its deadline.")
        return [self._end(request, FinishReason.ERROR, error) for request in late]

    def _step(self, stepper: Stepper) -> list[TokenEvent]:
        self.step_started = began = time.monotonic()
        events = stepper.step()
        self.step_seconds.observe(time.monotonic() - began)
        self.steps += 1
        num_tokens = 0
        for event in events:
            num_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                self._live.remove(event.request)  # KeyError here: a second final event, our bug
                self.num_ended += 1
        self.generated_tokens += num_tokens
        return events

    def _end(self, request: GenerationRequest, reason: FinishReason, error: Exception | None = None) -> TokenEvent:
        """Make the final event of a request that the stepper does not end itself."""
        self._live.remove(request)
        self.num_ended += 1
        return TokenEvent(request, (), reason, error=error)

    def _emit(self, events: list[TokenEvent]) -> None:
        """Hand each lane its events."""
        if not events:
            return
        if len(self._sinks) == 1:
            self._deliver(self._sinks[0], events)
            return
        lanes: list[list[TokenEvent]] = [[] for _ in self._sinks]
        for event in events:
            lanes[event.request.lane].append(event)
        for sink, batch in zip(self._sinks, lanes, strict=True):
            if batch:
                self._deliver(sink, batch)

    def _deliver(self, sink: EventSink, batch: list[TokenEvent]) -> None:
        sink.put(batch)
        while sink.lag() > MAX_LAG_BATCHES:  # an engine faster than its readers would fill the memory
            time.sleep(LAG_PAUSE_S)

    def _end_all(self, error: FtserveError) -> None:
        """End every live request with `error`."""
        reason = FinishReason.CANCELLED if isinstance(error, RequestCancelledError) else FinishReason.ERROR
        self._emit([self._end(request, reason, error) for request in tuple(self._live)])
        self.num_live = 0

    def _mourn(self, cause: BaseException) -> None:
        """Answer every request, live or yet to come, with the reason of death, until closed."""
        reason = str(cause) if isinstance(cause, FtserveError) else type(cause).__name__
        self.death = EngineDeadError(f"The engine has stopped ({reason}).")
        self.death.__cause__ = cause
        self._enter(EngineState.DEAD)
        self.num_running = self.num_waiting = 0
        self.step_started = 0.0
        while True:
            self._end_all(self.death)
            commands = self.inbox.wait()
            self._live.update(r for kind, r in commands if r is not None and kind is CommandKind.SUBMIT)
            if any(kind is CommandKind.CLOSE for kind, _ in commands):
                self._end_all(self.death)
                return
