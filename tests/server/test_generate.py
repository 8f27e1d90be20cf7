"""`POST /inference/v1/generate`: tokens in, tokens out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ftserve.engine.null import NULL_TEXT
from tests.server.serving import MODEL, RunningServer

PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def script(null_server: RunningServer) -> list[int]:
    """Return the tokens that the engine says."""
    ids: list[int] = null_server.http.post("/tokenize", json={"prompt": NULL_TEXT}).json()["tokens"]
    return ids


def post(server: RunningServer, sampling: dict[str, Any], **fields: object) -> dict[str, Any]:
    response = server.http.post(PATH, json={"token_ids": [1, 2, 3], "sampling_params": sampling, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, sampling: dict[str, Any], **fields: object) -> list[dict[str, Any]]:
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "stream": True, **fields}
    *events, end = server.http.post(PATH, json=body).text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_answer_has_vllms_shape(null_server: RunningServer, script: list[int]) -> None:
    answer = post(null_server, {"max_tokens": 5, "n": 2}, request_id="mine", model=MODEL)
    assert answer["request_id"] == "mine"
    assert answer["choices"] == [
        {"index": k, "token_ids": script[:5], "logprobs": None, "finish_reason": "length"} for k in range(2)
    ]
    assert answer["prompt_logprobs"] is None
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 10)


def test_the_streams_tokens_are_the_whole_answers(null_server: RunningServer, script: list[int]) -> None:
    chunks = stream(null_server, {"max_tokens": 120})
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == script[:120]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


def test_the_stop_token_is_among_the_tokens(null_server: RunningServer, script: list[int]) -> None:
    sampling = {"max_tokens": 50, "stop_token_ids": [script[9]]}
    (choice,) = post(null_server, sampling)["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (script[:10], "stop")
    chunks = stream(null_server, sampling)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == script[:10]


def test_usage_is_streamed_on_request(null_server: RunningServer) -> None:
    last = stream(null_server, {"max_tokens": 5}, stream_options={"include_usage": True})[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": None}, "sampling_params"),
        ({"model": "other"}, "model"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_bad_value_is_named(null_server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = null_server.http.post(PATH, json={"token_ids": [1], "sampling_params": {}, **fields})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
