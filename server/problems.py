"""The one place that turns errors into HTTP answers, in OpenAI's shape. No foreign text reaches a client."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from ftserve.engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    FtserveError,
    InvalidRequestError,
    MediaError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
)

log = logging.getLogger("ftserve.server")

JSON_HEADERS = [("content-type", "application/json")]


class HttpError(FtserveError):
    """An error of the HTTP request itself: path, method, body size, content type."""

    def __init__(self, status: int, message: str, *, code: str | None = None, allow: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.allow = allow  # the methods that a 405 must name


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    allow: str | None = None

    def body(self) -> str:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False)

    def headers(self) -> list[tuple[str, str]]:
        headers = [*JSON_HEADERS]
        if self.retry_after_s is not None:
            headers.append(("retry-after", str(self.retry_after_s)))
        if self.allow is not None:
            headers.append(("allow", self.allow))
        return headers


_KINDS = {401: "authentication_error", 404: "not_found_error"}

LOADING = Problem(503, "service_unavailable", "The model is being loaded.", code="loading", retry_after_s=5)
DRAINING = Problem(503, "service_unavailable", "The server is stopping.", code="draining", retry_after_s=10)


def problem_of(error: BaseException, request_id: str = "") -> Problem:
    """Return what a client is told of `error`. What is not ours is logged and becomes a plain 500."""
    match error:
        case HttpError():
            kind = _KINDS.get(error.status, "invalid_request_error")
            return Problem(error.status, kind, error.message, code=error.code, allow=error.allow)
        case InvalidRequestError():
            return Problem(400, "invalid_request_error", error.message, error.param, error.code)
        case MediaError():
            return Problem(422, "invalid_request_error", error.message, error.param, "media_error")
        case ModelNotFoundError():
            return Problem(404, "not_found_error", error.message, "model", "model_not_found")
        case OverloadedError():
            return Problem(429, "rate_limit_error", error.message, code="queue_full", retry_after_s=error.retry_after_s)
        case DeadlineExceededError():
            return Problem(408, "timeout_error", error.message, code="deadline_exceeded")
        case RequestCancelledError():
            return Problem(503, "service_unavailable", error.message, code="cancelled", retry_after_s=10)
        case EngineDeadError():
            return Problem(503, "service_unavailable", error.message, code="engine_dead", retry_after_s=30)
        case FtserveError():
            return Problem(500, "server_error", error.message)
        case _:
            log.error("request %s failed", request_id, exc_info=error)
            return Problem(500, "server_error", "The server failed to answer this request.")
