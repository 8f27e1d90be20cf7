"""A front end in a process of its own: HTTP, preprocessing and output, with the engine in another process."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftserve.engine.config import EngineConfig
from ftserve.engine.remote import RemoteEngine
from ftserve.engine.threads import name_this_thread
from ftserve.server.config import ServerConfig
from ftserve.server.control import Channel
from ftserve.server.http import bind
from ftserve.server.model import ServedModel
from ftserve.server.output import OutputThread
from ftserve.server.overview import Report
from ftserve.server.responses_shared import SharedResponseStore
from ftserve.server.service import Service

log = logging.getLogger("ftserve")


class Place(NamedTuple):
    """What tells one front end from the others."""

    slot: int  # which of them it is
    link: int  # a number that none before it had
    folder: Path  # its own, private
    listener: socket.socket | None  # inherited; None: one of its own at the same port


class FrontProcess:
    """One front end. Made and run on the main thread, obeying on another."""

    def __init__(self, config: ServerConfig, place: Place, channel: Channel) -> None:
        self._place = place
        self._channel = channel
        self._gathering = Gathering(channel)
        self._stop, self._abort, self._end = threading.Event(), threading.Event(), threading.Event()
        self._listener = bind(config, is_shared=True) if place.listener is None else place.listener
        self._responses = SharedResponseStore(
            place.folder.parent,
            slot=place.slot,
            abort_elsewhere=lambda response_id: channel.send("abort response", response_id=response_id),
            max_chars=int(config.response_store_mb * 2**20),
            max_age_s=config.response_store_hours * 3600,
        )
        self._service = Service(config, self._connect, self._gathering, self._responses)
        self._engine: RemoteEngine

    def run(self) -> None:
        """Serve until the supervisor says that all have drained."""
        name_this_thread(f"ft-front-{self._place.slot}")
        service = self._service
        threading.Thread(target=self._obey, name="ftserve-control", daemon=True).start()
        service.start(self._stop, self._listener)
        if not self._stop.is_set():
            self._channel.send("ready", lines=service.start_lines(_ARRANGEMENT.format(service.config)))
        service.run(self._stop)
        service.drain(self._abort)
        self._channel.send("drained")
        self._end.wait()
        service.stop()

    def _connect(self, _config: EngineConfig, _model: ServedModel, outputs: Sequence[OutputThread]) -> RemoteEngine:
        place = self._place
        sinks = [output.feed() for output in outputs]
        self._engine = RemoteEngine(place.folder, sinks, slot=place.slot, link=place.link)
        return self._engine

    def _obey(self) -> None:
        while (message := self._channel.receive()) is not None:
            try:
                self._do(message)
            except Exception:
                log.exception("a message of the supervisor could not be followed")
        os._exit(1)  # without a supervisor nobody would end or replace us

    def _do(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "engine":
            self._engine.connect(message["number"], message["endpoint"])
        elif kind == "engine lost":
            self._engine.lose(message["reason"])
        elif kind == "report":
            self._channel.send("reported", id=message["id"], report=self._service.overview.report())
        elif kind == "reported":
            self._gathering.add(message)
        elif kind == "abort response":
            self._responses.abort(message["response_id"])
        else:
            for event in {"drain": (self._stop,), "abort": (self._stop, self._abort), "end": (self._end,)}[kind]:
                event.set()


class Gathering:
    """Reports of all front ends, asked for through the supervisor.

    Shared fields, under one lock: `_waiting` and `_next`; HTTP threads ask, the obeying thread answers.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, tuple[list[Report], Callable[[Sequence[Report]], None]]] = {}

    def gather(self, then: Callable[[Sequence[Report]], None]) -> None:
        """Ask; `then` is called on the obeying thread, once no more reports are to come."""
        with self._lock:
            self._next += 1
            self._waiting[self._next] = [], then
            number = self._next
        self._channel.send("gather", id=number)

    def add(self, message: Mapping[str, Any]) -> None:
        """Take one report, or learn that there are no more. Obeying thread."""
        with self._lock:
            reports, then = self._waiting[message["id"]]
            if "report" in message:
                reports.append(message["report"])
                return
            del self._waiting[message["id"]]
        then(reports)


_ARRANGEMENT = (
    "processes: {0.front_ends} front ends with {0.threads.http} http, {0.threads.preprocess} preprocess and "
    "{0.threads.output} output threads each, 1 engine"
)
