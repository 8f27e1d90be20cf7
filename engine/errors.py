"""Errors that cross a thread or reach a client.

    FtserveError                    message is ours and safe to show to a client
    ├── InvalidRequestError         the client's fault; names the field
    ├── RequestTooLongError         prompt (or prompt + max_tokens) exceeds the model's length
    ├── MediaError                  an image, clip or sound cannot be fetched or decoded; names the part
    ├── ModelNotFoundError          no such model here
    ├── OverloadedError             a bounded queue is full; carries retry_after_s
    ├── DeadlineExceededError       the request's deadline passed
    ├── RequestCancelledError       the client went away, or the server is stopping
    └── EngineError                 ours
        ├── EngineDeadError         the engine thread stopped; nothing more can be served
        └── EngineRequestError      one request failed inside the engine; the others go on

Foreign exceptions are translated where a library is called, with ``from``; `server.problems` alone turns
these classes into HTTP answers.
"""

from __future__ import annotations


class FtserveError(Exception):
    """Base of every error whose message may be shown to a client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequestError(FtserveError):
    """The request cannot be served as it was written."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLongError(InvalidRequestError):
    """The prompt, or the prompt with its `max_tokens`, is longer than the model can hold."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class MediaError(FtserveError):
    """A part of the request that is not text cannot be fetched or decoded."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(FtserveError):
    """The request names a model that this server does not serve."""


class OverloadedError(FtserveError):
    """A bounded queue is full; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(FtserveError):
    """The request was not finished by its deadline."""


class RequestCancelledError(FtserveError):
    """The request was ended from outside: its client went away, or the server is stopping."""


class EngineError(FtserveError):
    """The engine failed; no fault of the request."""


class EngineDeadError(EngineError):
    """The engine thread has stopped for good."""


class EngineRequestError(EngineError):
    """One request failed inside the engine; the engine lives on."""
