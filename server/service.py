"""The composition root: makes every part, starts them in order, stops them in order.

The same parts make a whole server, with an engine on a thread, and a front end among several, whose engine is in a
process of its own; `processes.py` arranges those.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence

import ftserve
from ftserve.engine.client import Engine
from ftserve.engine.config import EngineConfig
from ftserve.engine.threads import name_this_thread
from ftserve.preprocess.pool import PreprocessPool
from ftserve.server.admission import Admission
from ftserve.server.app import App
from ftserve.server.auth import ApiKeys
from ftserve.server.config import ServerConfig
from ftserve.server.cors import Cors
from ftserve.server.dialect import describe
from ftserve.server.engines import make_engine
from ftserve.server.garbage import GarbageKeeper
from ftserve.server.generation import GenerationWorker, Job
from ftserve.server.http import HttpServer, check_granian
from ftserve.server.loading import load_model
from ftserve.server.media import make_media
from ftserve.server.metrics import Recorder, ServerCollector, is_gil_enabled
from ftserve.server.model import ServedModel
from ftserve.server.output import OutputThread
from ftserve.server.overview import Load, LocalOverview, MergedOverview, Reports
from ftserve.server.problems import DRAINING
from ftserve.server.responses import Responses
from ftserve.server.responses_shared import SharedResponseStore
from ftserve.server.responses_store import ResponseStore
from ftserve.server.uploads import Uploads

log = logging.getLogger("ftserve")

Connect = Callable[[EngineConfig, ServedModel, Sequence[OutputThread]], Engine]

MAINTENANCE_INTERVAL_S = 1.0
_LOADING_GLANCE_S = 0.2  # how often a signal is looked for while the model loads
_STOP_GRACE_S = 1.0  # for each part, beyond the drain's own deadline


class Service:
    """All of a server but for an engine that is elsewhere. Made, started and stopped on the main thread."""

    def __init__(
        self,
        config: ServerConfig,
        connect: Connect = make_engine,
        reports: Reports | None = None,
        response_store: SharedResponseStore | None = None,
    ) -> None:
        """Read the model's files and wire the parts; nothing runs yet.

        `connect` makes the engine, or the way to it. `reports` gathers those of other front ends, if there are any, and
        `response_store` is the one of all.

        Raises:
            CheckpointError: there is no such model.
            ValueError: a setting does not fit the model.
        """
        self.config = config
        self._engine_config, self.model = load_model(config)
        self._outputs = [OutputThread(lane) for lane in range(config.threads.output)]
        self.engine = connect(self._engine_config, self.model, self._outputs)
        self._media = make_media(config.media, self.model.checkpoint, num_threads=config.threads.preprocess)
        self._recorders = [Recorder() for _ in range(config.threads.preprocess)]
        self._pool: PreprocessPool[Job] = PreprocessPool(config.threads.preprocess, self._make_worker, _abandon)
        self.admission = Admission(config.max_concurrent_requests, int(config.body_memory_gb * 2**30))
        self._uploads = Uploads(min(config.body_timeout_s, config.request_timeout_s))
        self._garbage = GarbageKeeper()
        self._response_store = response_store or ResponseStore(
            max_chars=int(config.response_store_mb * 2**20), max_age_s=config.response_store_hours * 3600
        )
        self.overview = LocalOverview(self._collector(), self._load, self._engine_load)
        self.app = App(
            self.model,
            self.engine,
            self._pool,
            self.admission,
            self._uploads,
            self.overview if reports is None else MergedOverview(self.overview, reports),
            media=self._media,
            responses=Responses(self._response_store),
            keys=ApiKeys(config.api_keys),
            cors=Cors(config.allowed_origins),
            root_path=config.root_path,
            max_body_bytes=int(config.max_body_mb * 2**20),
            step_timeout_s=config.step_timeout_s,
        )
        self._http = HttpServer(config, self.app)
        self.url = ""  # once started

    def start(self, stop: threading.Event, listener: socket.socket | None = None) -> None:
        """Start every thread and wait until the model can be served, or until `stop` is set.

        `listener` is a bound socket that takes the place of the configured address.

        Raises:
            OSError: the address cannot be had.
            EngineDeadError: the model cannot be loaded.
        """
        self.url = self._http.bind(listener)
        for output in self._outputs:
            output.start()
        self._pool.start()
        if self._media is not None:
            self._media.intake.start()
        self.engine.start()
        self._http.start()
        self._pool.wait_loaded()
        if self._media is not None:
            self._media.intake.wait_loaded()
        while not self.engine.wait_loaded(_LOADING_GLANCE_S):
            if stop.is_set():
                return
        self._garbage.settle()
        if self._engine_config.kind == "torch":  # the others follow no grammar
            self.model.grammars.warm_up()

    def run(self, stop: threading.Event) -> bool:
        """Do the main thread's upkeep until `stop` is set, or the engine fails and that is to be the end.

        Returns:
            Whether all is well.

        Raises:
            RuntimeError: the HTTP worker has died.
        """
        while not stop.wait(MAINTENANCE_INTERVAL_S):
            if not self._http.is_alive():
                raise RuntimeError("the HTTP worker has died")
            self._uploads.expire()
            stats = self.engine.stats()
            self._garbage.collect_if_due(is_idle=stats.num_live == 0, work_done=stats.steps)
            has_failed = self.engine.death is not None or stats.step_age_s > self.config.step_timeout_s
            if has_failed and self.config.on_engine_failure == "exit":
                log.error("ending the server, since its engine has failed")
                return False
        return True

    def drain(self, abort: threading.Event) -> None:
        """Take no new work, and wait until what runs has finished, until the deadline or `abort`."""
        self.app.is_draining = True
        deadline = time.monotonic() + self.config.shutdown_timeout_s
        while not self.admission.wait_empty(0.05) and time.monotonic() < deadline and not abort.is_set():
            self._uploads.expire()

    def stop(self) -> None:
        """End what still runs with an error event, and then every part. After `drain`."""
        self._uploads.abort(DRAINING)
        if left := self.admission.num_inside():
            log.warning("ending %d requests at the deadline of the shutdown", left)
        if self._media is not None:
            self._media.intake.close(_STOP_GRACE_S)
        self._pool.close(_STOP_GRACE_S)
        self.model.close()
        self.engine.close(_STOP_GRACE_S)
        for output in self._outputs:
            output.close(_STOP_GRACE_S)
        self.admission.wait_empty(_STOP_GRACE_S)
        self._http.stop(_STOP_GRACE_S)

    def start_lines(self, arrangement: str = "") -> list[str]:
        """Return what an operator wants to know once all runs; the first line at every level of the log.

        `arrangement` says of what the server is made, if not of threads.
        """
        return [self._start_line(arrangement), self._sampling_line(), self._curl_line()]

    def _make_worker(self, number: int) -> GenerationWorker:
        name_this_thread(f"ft-pre-{number}")
        worker = GenerationWorker(
            self.model,
            self.engine,
            self._recorders[number],
            num_lanes=len(self._outputs),
            first_lane=number,
            request_timeout_s=self.config.request_timeout_s,
            max_response_bytes=self.config.max_response_bytes,
            max_logprobs=self.config.max_logprobs,
            media=self._media,
            resume=self._pool.put,
        )
        worker.warm_up()
        return worker

    def _collector(self) -> ServerCollector:
        gauges = {
            "response_store_chars": ("Characters of responses that are kept", self._response_store.num_chars),
            "http_requests_inside": ("Requests between head and last byte", self.admission.num_inside),
            "http_bodies_reading": ("Requests whose body is being read", self._uploads.num_reading),
            "http_body_bytes": ("Bytes of bodies that are being read or wait", lambda: self.admission.num_body_bytes),
            "preprocess_queue_depth": ("Requests that wait for a preprocess thread", self._pool.depth),
            "output_lag_batches": (
                "Engine steps that output threads have not handled",
                lambda: sum(output.lag() for output in self._outputs),
            ),
        }
        media = self._media
        return ServerCollector(
            lambda: [
                *self._recorders,
                *(output.recorder for output in self._outputs),
                *(media.recorders if media is not None else ()),
            ],
            self.engine.stats,
            self.engine.step_seconds,
            {**gauges, **(media.gauges() if media is not None else {})},
            media.counters() if media is not None else {},
            self._garbage.pauses,
            ftserve.__version__,
        )

    def _load(self) -> Load:
        return {"server_load": self.admission.num_inside(), "preprocess_queue_depth": self._pool.depth()}

    def _engine_load(self) -> Load:
        stats = self.engine.stats()
        return {"num_requests_running": stats.num_running, "num_requests_waiting": stats.num_waiting}

    def _sampling_line(self) -> str:
        """Return what requests get that say nothing of sampling."""
        defaults = self.model.checkpoint.generation_defaults
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items()) or "as OpenAI's API has them"
        return f"sampling defaults (--generation-config {self.config.generation_config}): {values}"

    def _curl_line(self) -> str:
        """Return a command to try."""
        where = f"--unix-socket {self.config.uds} http://localhost" if self.config.uds else self.url
        body: dict[str, object] = {"model": self.model.name, "prompt": "Once upon a time", "max_tokens": 40}
        path = "completions"
        if self.model.embeds:
            body, path = {"model": self.model.name, "input": ["Once upon a time"]}, "embeddings"
        return f"try: curl {where}/v1/{path} -H 'content-type: application/json' -d '{json.dumps(body)}'"

    def _start_line(self, arrangement: str) -> str:
        threads, about = self.config.threads, self.engine.description
        arrangement = arrangement or (
            f"threads: {threads.http} http, {threads.preprocess} preprocess, {threads.output} output, "
            f"{len(self._engine_config.by_device())} engine"
        )
        return (
            f"serving {self.model.name} at {self.url} "
            f"(Python {platform.python_version()}, GIL {'on' if is_gil_enabled() else 'off'}; {arrangement}; "
            f"engine {self._engine_config.kind}, "
            f"device {about['device']}, dtype {about['dtype']}, KV cache {about['kv_capacity_tokens']} tokens; "
            f"{describe(self.model.dialect)}; "
            f"encoder {'fastokens' if self.model.use_fastokens else 'tokenizers'}, "
            f"context {self.model.max_model_len})"
        )


def _abandon(job: Job) -> None:
    job.exchange.refuse(DRAINING)


def check_environment(*, needs_threads: bool = True) -> None:
    """Fail early where the program cannot work as designed; `needs_threads` to run side by side.

    Raises:
        RuntimeError: says what is wrong.
    """
    if needs_threads and is_gil_enabled():
        raise RuntimeError("the GIL is on")
    if (reason := check_granian()) is not None:
        raise RuntimeError(reason)
