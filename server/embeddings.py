"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ftserve.engine.client import Engine
from ftserve.engine.errors import EngineError, InvalidRequestError, RequestCancelledError, RequestTooLongError
from ftserve.engine.types import GenerationRequest, RequestTimes, SamplingParams, TokenEvent, Usage
from ftserve.server.exchange import Exchange
from ftserve.server.generation import GenerationWorker
from ftserve.server.model import ServedModel
from ftserve.server.problems import JSON_HEADERS, problem_of
from ftserve.server.prompts import token_ids_of
from ftserve.server.wire import EmbeddingRequest, parse

MAX_INPUTS = 2048  # OpenAI's

_NO_SAMPLING = SamplingParams(max_tokens=1)


def refuse_to_embed(worker: GenerationWorker, _exchange: Exchange) -> None:
    """Refuse embeddings of a model that generates text."""
    raise InvalidRequestError(
        f"The model '{worker.model.name}' generates text here; a server with '--task embed' makes embeddings of it.",
        param="model",
    )


def refuse_to_generate(worker: GenerationWorker, _exchange: Exchange) -> None:
    """Refuse to generate text with a model that makes embeddings."""
    raise InvalidRequestError(
        f"The model '{worker.model.name}' makes embeddings and generates no text; use /v1/embeddings.", param="model"
    )


def submit_embeddings(worker: GenerationWorker, exchange: Exchange) -> None:
    """Turn a body into one request an input. Preprocess thread."""
    times = exchange.times
    fields = parse(EmbeddingRequest, exchange.take_body())
    worker.check_model(fields.model)
    times.validated = times.templated = time.monotonic()
    _check(fields, worker.model)
    prompts = token_ids_of(
        fields.input, worker, add_special_tokens=fields.add_special_tokens is not False, param="input"
    )
    longest = max(map(len, prompts))
    if longest > worker.model.max_model_len:
        raise RequestTooLongError(
            f"The model holds {worker.model.max_model_len} tokens; an input has {longest}.", param="input"
        )
    times.tokenized = time.monotonic()
    reply = EmbeddingReply(exchange, worker.engine, worker.model, fields, prompts)
    lane = worker.take_lane()
    requests = [
        GenerationRequest(
            request_id=exchange.request_id,
            index=index,
            prompt_ids=prompt,
            sampling=_NO_SAMPLING,
            lane=lane,
            route=reply,
            deadline=worker.deadline_of(exchange),
            priority=fields.priority or 0,
            replica=worker.engine.place(prompt),
            times=times,
        )
        for index, prompt in enumerate(prompts)
    ]
    reply.expect(requests)
    times.submitted = time.monotonic()
    if not exchange.submit(worker.engine, requests):
        reply.release()
        raise RequestCancelledError("The client has gone.")


def _check(fields: EmbeddingRequest, model: ServedModel) -> None:
    if isinstance(fields.input, list) and len(fields.input) > MAX_INPUTS and not isinstance(fields.input[0], int):
        raise InvalidRequestError(f"More than {MAX_INPUTS} inputs in one request.", param="input")
    size = model.checkpoint.hidden_size
    if fields.dimensions is not None and size is not None and fields.dimensions > size:
        raise InvalidRequestError(f"The model's embeddings have {size} dimensions.", param="dimensions")


class EmbeddingReply:
    """Collects the vectors of one request and writes them; an `Answer`, as `server/output.py` has it."""

    __slots__ = (
        "_data",
        "_dimensions",
        "_engine",
        "_is_base64",
        "_model",
        "_num_open",
        "_prompt_tokens",
        "_requests",
        "error",
        "exchange",
        "flow",
        "is_done",
        "times",
    )

    def __init__(
        self,
        exchange: Exchange,
        engine: Engine,
        model: ServedModel,
        fields: EmbeddingRequest,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self.exchange = exchange
        self.times: RequestTimes = exchange.times
        self.error: BaseException | None = None
        self.is_done = False
        self.flow: Callable[[int], bool] | None = None  # for streams
        self._engine = engine
        self._model = model
        self._dimensions = fields.dimensions
        self._is_base64 = fields.encoding_format == "base64"
        self._prompt_tokens = sum(map(len, prompts))
        self._num_open = len(prompts)
        self._data = [""] * len(prompts)  # JSON
        self._requests: Sequence[GenerationRequest] = ()

    def expect(self, requests: Sequence[GenerationRequest]) -> None:
        """Say which requests belong to this reply. Before they are submitted."""
        self._requests = requests

    def feed(self, event: TokenEvent) -> bool:
        """Take one event; True if the caller shall `flush`."""
        if self.is_done or self.error is not None:
            return False
        if event.embedding is None:
            self.error = event.error or RequestCancelledError("The request was cancelled.")
            for request in self._requests:
                if request is not event.request:
                    self._engine.cancel(request)
            return True
        self._data[event.request.index] = self._write(event.request.index, np.frombuffer(event.embedding, np.float32))
        self._num_open -= 1
        return self._num_open == 0

    def flush(self) -> None:
        """Answer."""
        if self.error is not None:
            self.exchange.refuse(problem_of(self.error, self.exchange.request_id))
        else:
            self.exchange.respond(200, JSON_HEADERS, self._body())
        self.is_done = True

    def give_up(self) -> None:
        """End after a failure of our own; the engine forgets the request."""
        self.error = self.error or RuntimeError("the reply could not be written")
        self.exchange.cancel()
        self.exchange.refuse(problem_of(EngineError("The server failed to answer this request.")))
        self.is_done = True

    def release(self) -> None:
        """Forget the requests, which lead back here."""
        self._requests = ()

    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, 0)

    def _write(self, index: int, vector: NDArray[np.float32]) -> str:
        if self._dimensions is not None and self._dimensions < len(vector):
            was_unit = abs(float(np.linalg.norm(vector)) - 1.0) < 1e-3
            vector = vector[: self._dimensions]
            if was_unit:
                vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        if self._is_base64:  # of little-endian float32
            text = f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
        else:
            text = json.dumps(vector.tolist(), separators=(",", ":"))
        return f'{{"object":"embedding","index":{index},"embedding":{text}}}'

    def _body(self) -> str:
        name, tokens = json.dumps(self._model.name), self._prompt_tokens
        return (
            f'{{"object":"list","data":[{",".join(self._data)}],"model":{name},'
            f'"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}'
        )
