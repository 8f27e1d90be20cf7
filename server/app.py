"""Routes. Everything here runs on an HTTP thread and never blocks: what takes time goes to the preprocess pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import ftserve
from ftserve.engine.client import Engine
from ftserve.engine.errors import ModelNotFoundError, OverloadedError
from ftserve.engine.loop import EngineState
from ftserve.preprocess.pool import PreprocessPool
from ftserve.server.admission import Admission
from ftserve.server.auth import OPEN_PATHS, ApiKeys
from ftserve.server.chat import parse_chat, prepare_chat
from ftserve.server.completions import prepare_completion
from ftserve.server.cors import Cors
from ftserve.server.embeddings import refuse_to_embed, refuse_to_generate, submit_embeddings
from ftserve.server.exchange import Exchange, Headers
from ftserve.server.generate import prepare_generate
from ftserve.server.generation import Handle, Job
from ftserve.server.media import LARGE_BODY_BYTES, MediaFront
from ftserve.server.model import ServedModel
from ftserve.server.openapi import openapi_json
from ftserve.server.overview import Overview
from ftserve.server.pages import HTML_HEADERS, read_page
from ftserve.server.problems import DRAINING, JSON_HEADERS, LOADING, HttpError, Problem, problem_of
from ftserve.server.responses import Responses
from ftserve.server.tokenization import answer_detokenize, answer_tokenize
from ftserve.server.uploads import Uploads

METRICS_HEADERS = [("content-type", "text/plain; version=0.0.4; charset=utf-8")]

# A request that is refused for lack of room is still read if it is small: a connection that is closed with unread data
# is reset, and the client might never see the answer.
MAX_REFUSED_BYTES = 64 << 10

_RESPONSES = "/v1/responses/"


def _posts(model: ServedModel, responses: Responses) -> dict[str, Handle]:
    """Return what a preprocess thread does with the body of each path."""
    posts: dict[str, Handle] = {
        "/v1/chat/completions": prepare_chat,
        "/v1/completions": prepare_completion,
        "/v1/responses": responses.prepare,
        "/inference/v1/generate": prepare_generate,
    }
    if model.embeds:
        posts = dict.fromkeys(posts, refuse_to_generate)
    return {
        **posts,
        "/v1/embeddings": submit_embeddings if model.embeds else refuse_to_embed,
        "/tokenize": answer_tokenize,
        "/detokenize": answer_detokenize,
    }


class App:
    """The request handler that `HttpServer` calls."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        pool: PreprocessPool[Job],
        admission: Admission,
        uploads: Uploads,
        overview: Overview,
        *,
        media: MediaFront | None,
        responses: Responses,
        keys: ApiKeys,
        cors: Cors,
        root_path: str,
        max_body_bytes: int,
        step_timeout_s: float,
    ) -> None:
        self.is_draining = False  # written once by the main thread; HTTP threads read it
        self._model = model
        self._engine = engine
        self._pool = pool
        self._admission = admission
        self._uploads = uploads
        self._overview = overview
        self._media = media
        self._responses = responses
        self._posts = _posts(model, responses)
        self._keys = keys
        self._cors = cors
        self._root_path = root_path.rstrip("/")
        self._max_body_bytes = max_body_bytes
        self._step_timeout_s = step_timeout_s
        self._pages: dict[str, Callable[[Exchange], None]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/ping": self._ping,
            "/load": self._load,
            "/version": self._version,
            "/v1/models": self._models,
            "/openapi.json": partial(_constant, JSON_HEADERS, openapi_json()),
            "/docs": partial(_constant, HTML_HEADERS, read_page("docs")),
            "/": partial(_constant, HTML_HEADERS, read_page("index")),
        }

    def __call__(self, exchange: Exchange) -> None:
        """Answer, or see to it that somebody does. HTTP thread; never raises."""
        try:
            self._route(exchange)
        except Exception as exc:  # noqa: BLE001 - the one door to error answers
            exchange.refuse(problem_of(exc, exchange.request_id))

    def _route(self, exchange: Exchange) -> None:
        path, method = exchange.path.removeprefix(self._root_path), exchange.method
        if self._cors.admit(exchange):
            return
        if path not in OPEN_PATHS:
            self._keys.check(exchange)
        handle = self._posts.get(path)
        if handle is not None:
            _allow(method, "POST")
            self._post(exchange, handle)
        elif (page := self._pages.get(path)) is not None:
            _allow(method, "GET", "HEAD")
            page(exchange)
        elif path.startswith(_RESPONSES):
            self._one_response(exchange, method, path.removeprefix(_RESPONSES))
        elif path.startswith("/v1/models/"):
            _allow(method, "GET", "HEAD")
            self._one_model(exchange, path.removeprefix("/v1/models/"))
        else:
            raise HttpError(404, f"There is nothing at {method} {path[:200]}.")

    def _one_response(self, exchange: Exchange, method: str, rest: str) -> None:
        response_id, _, action = rest.partition("/")
        if action == "cancel":
            _allow(method, "POST")
            self._post(exchange, partial(self._responses.cancel, response_id=response_id))
        elif action:
            raise HttpError(404, f"There is nothing at {method} {_RESPONSES}{rest[:200]}.")
        else:
            _allow(method, "GET", "HEAD", "DELETE")
            ask = self._responses.delete if method == "DELETE" else self._responses.get
            ask(exchange, response_id)

    def _post(self, exchange: Exchange, handle: Handle) -> None:
        if (problem := self._refusal()) is not None:
            exchange.refuse(problem)
            return
        length = self._body_length(exchange)
        try:
            exchange.occupy(self._admission.enter(length))
        except OverloadedError as exc:
            if length > MAX_REFUSED_BYTES:
                raise
            problem = problem_of(exc)
            self._uploads.read(exchange, then=lambda: exchange.refuse(problem), failed=lambda: _truncated(exchange))
            return
        self._uploads.read(exchange, then=lambda: self._enqueue(exchange, handle), failed=lambda: _truncated(exchange))

    def _refusal(self) -> Problem | None:
        """Return why nothing can be taken now, if so."""
        if self.is_draining:
            return DRAINING
        if self._engine.death is not None:
            return problem_of(self._engine.death)
        return LOADING if self._engine.state is EngineState.LOADING else None

    def _body_length(self, exchange: Exchange) -> int:
        """Return how many bytes the head announces; raises HttpError for a head that cannot be served."""
        content_type = exchange.headers.get("content-type")
        if content_type is not None and "json" not in content_type.lower():
            raise HttpError(415, "The body must be JSON; send 'content-type: application/json'.")
        length = exchange.headers.get("content-length")
        if length is None or exchange.headers.get("transfer-encoding") is not None:  # that one wins, and has no bound
            raise HttpError(411, "Send the body with a content-length.")
        if int(length) > self._max_body_bytes:
            raise HttpError(413, f"The body is larger than {self._max_body_bytes} bytes.")
        return int(length)

    def _enqueue(self, exchange: Exchange, handle: Handle) -> None:
        exchange.watch_disconnect()
        if self._media is not None and handle is prepare_chat and len(exchange.body) >= LARGE_BODY_BYTES:
            self._media.intake.put(lambda _observe: parse_chat(exchange, self._pool.put))
        else:
            self._pool.put(Job(exchange, handle))

    def _health(self, exchange: Exchange) -> None:
        stats = self._engine.stats()
        if (death := self._engine.death) is not None:
            exchange.refuse(problem_of(death))
        elif stats.step_age_s > self._step_timeout_s:
            exchange.refuse(Problem(503, "service_unavailable", "The engine is stuck in a step.", code="engine_stuck"))
        else:
            _json(exchange, {"status": "ok", "engine": stats.state.value})

    def _ready(self, exchange: Exchange) -> None:
        problem = self._refusal()
        if problem is not None:
            exchange.refuse(problem)
        else:
            _json(exchange, {"status": "ready"})

    def _metrics(self, exchange: Exchange) -> None:
        self._overview.metrics(lambda text: exchange.respond(200, METRICS_HEADERS, text))

    def _ping(self, exchange: Exchange) -> None:
        _json(exchange, {})

    def _load(self, exchange: Exchange) -> None:
        self._overview.load(lambda load: _json(exchange, load))

    def _version(self, exchange: Exchange) -> None:
        _json(exchange, {"version": ftserve.__version__})

    def _models(self, exchange: Exchange) -> None:
        _json(exchange, {"object": "list", "data": [self._model.public()]})

    def _one_model(self, exchange: Exchange, name: str) -> None:
        if name != self._model.name:
            raise ModelNotFoundError(f"The model '{name[:200]}' does not exist here.")
        _json(exchange, self._model.public())


def _allow(method: str, *methods: str) -> None:
    if method not in methods:
        raise HttpError(405, f"{method[:20]} is not allowed here; use {methods[0]}.", allow=", ".join(methods))


def _truncated(exchange: Exchange) -> None:
    exchange.refuse(Problem(400, "invalid_request_error", "The body ended before it was whole.", code="truncated_body"))


def _constant(headers: Headers, body: str, exchange: Exchange) -> None:
    exchange.respond(200, headers, body)


def _json(exchange: Exchange, content: Mapping[str, object]) -> None:
    exchange.respond(200, JSON_HEADERS, json.dumps(content))
