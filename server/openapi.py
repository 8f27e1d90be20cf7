"""What the server takes, as OpenAPI describes it: made from the models that parse it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import ftserve
from ftserve.server.generate import GenerateRequest
from ftserve.server.responses_wire import ResponsesRequest
from ftserve.server.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)


class Post(NamedTuple):
    """A path that takes a JSON body."""

    model: type[BaseModel]
    summary: str
    streams: bool = False


POSTS: dict[str, Post] = {
    "/v1/chat/completions": Post(ChatRequest, "Continue a chat", streams=True),
    "/v1/completions": Post(CompletionRequest, "Continue a text", streams=True),
    "/v1/responses": Post(ResponsesRequest, "Continue a chat, with what it says kept here", streams=True),
    "/v1/embeddings": Post(EmbeddingRequest, "Make vectors of texts"),
    "/inference/v1/generate": Post(GenerateRequest, "Continue token ids with token ids", streams=True),
    "/tokenize": Post(TokenizeRequest, "Return the token ids of a text or a chat"),
    "/detokenize": Post(DetokenizeRequest, "Return the text of token ids"),
}
GETS: dict[str, str] = {
    "/v1/models": "List the model",
    "/v1/models/{id}": "Show the model",
    "/v1/responses/{id}": "Show a stored response",
    "/health": "Whether the server lives; never waits behind work",
    "/ready": "Whether it takes requests",
    "/ping": "Whether it answers",
    "/load": "How busy it is",
    "/version": "Which version it is",
    "/metrics": "What Prometheus reads",
}

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def make_openapi() -> dict[str, Any]:
    """Return the description of all paths; takes some tens of milliseconds."""
    models = list(dict.fromkeys(post.model for post in POSTS.values()))
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {path: {"post": _post(post)} for path, post in POSTS.items()}
    for path, summary in GETS.items():
        paths.setdefault(path, {})["get"] = _get(path, summary)
    paths["/v1/responses/{id}"]["delete"] = _get("/v1/responses/{id}", "Forget a stored response")
    return {
        "openapi": "3.1.0",
        "info": {"title": "ftserve", "version": ftserve.__version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def openapi_json() -> str:
    """Return the same as JSON."""
    return json.dumps(make_openapi())


def _post(post: Post) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if post.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": post.summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{post.model.__name__}"}}},
        },
        "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer"}, **_errors()},
    }
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _errors() -> dict[str, Any]:
    schema = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"default": {"description": "What went wrong", "content": schema}}
