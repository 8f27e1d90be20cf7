"""Fields beyond OpenAI's: token ids, timings, special tokens, templates, continued messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ftserve.engine.null import NULL_TEXT
from tests.server.serving import RunningServer, chat_body, completion_body

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")
END = {"role": "assistant", "content": "The capital is "}


def post(server: RunningServer, path: str, **fields: object) -> dict[str, Any]:
    response = server.http.post(path, json={**(chat_body() if path == CHAT else completion_body()), **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, path: str, **fields: object) -> list[dict[str, Any]]:
    body = {**(chat_body() if path == CHAT else completion_body()), **fields, "stream": True}
    *events, _ = server.http.post(path, json=body).text.removesuffix("\n\n").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def refusal(server: RunningServer, **fields: object) -> dict[str, Any]:
    response = server.chat(**fields)  # type: ignore[arg-type]
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def token_ids(server: RunningServer, text: str, **fields: object) -> list[int]:
    ids: list[int] = server.http.post("/tokenize", json={"prompt": text, **fields}).json()["tokens"]
    return ids


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_are_the_prompts_and_the_answers(null_server: RunningServer, path: str) -> None:
    script = token_ids(null_server, NULL_TEXT)
    answer = post(null_server, path, return_token_ids=True, max_tokens=7, n=2)
    holder = answer if path == CHAT else answer["choices"][1]
    assert len(holder["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert [choice["token_ids"] for choice in answer["choices"]] == [script[:7]] * 2
    assert "token_ids" not in post(null_server, path)["choices"][0]


@pytest.mark.parametrize("path", PATHS)
def test_streamed_token_ids_add_up_and_hold_the_stop_token(null_server: RunningServer, path: str) -> None:
    script = token_ids(null_server, NULL_TEXT)
    fields = {"return_token_ids": True, "max_tokens": 20, "stop_token_ids": [script[9]]}
    whole = post(null_server, path, **fields)
    assert whole["choices"][0]["token_ids"] == script[:10]
    chunks = stream(null_server, path, **fields)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == script[:10]
    first = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in chunks) == 1


@pytest.mark.parametrize("path", PATHS)
def test_timings_come_with_the_answer_or_in_the_last_event(null_server: RunningServer, path: str) -> None:
    timings = post(null_server, path, timings=True)["timings"]
    assert timings["predicted_n"] == 5
    assert all(value >= 0 for value in timings.values())
    *chunks, last = stream(null_server, path, timings=True)
    assert last["choices"] == []
    assert last["timings"]["prompt_n"] == timings["prompt_n"]
    assert not any("usage" in chunk for chunk in (*chunks, last))  # nobody asked
    last = stream(null_server, path, timings=True, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]


def test_special_tokens_are_text_for_who_wants_them(null_server: RunningServer) -> None:
    usual = post(null_server, COMPLETIONS, max_tokens=40)["choices"][0]["text"]
    verbatim = {"skip_special_tokens": False, "max_tokens": 40}
    assert post(null_server, COMPLETIONS, **verbatim)["choices"][0]["text"] == usual
    assert "".join(chunk["choices"][0]["text"] for chunk in stream(null_server, COMPLETIONS, **verbatim)) == usual


def test_special_tokens_are_added_or_not(null_server: RunningServer) -> None:
    plain = post(null_server, COMPLETIONS, return_token_ids=True, add_special_tokens=False)
    assert plain["choices"][0]["prompt_token_ids"] == token_ids(null_server, "Hello", add_special_tokens=False)


def test_a_message_is_continued(null_server: RunningServer) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "France?"}, END]}
    tokens = null_server.http.post("/tokenize", json={**fields, "continue_final_message": True}).json()["tokens"]
    text = null_server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("assistant\nThe capital is ")
    answer = post(null_server, CHAT, **fields, continue_final_message=True, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens
    error = refusal(null_server, **fields, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


def test_a_template_of_the_request_needs_the_operators_leave(null_server: RunningServer) -> None:
    assert refusal(null_server, chat_template="{{ messages }}")["param"] == "chat_template"


def test_a_template_of_the_request_is_rendered(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--trust-request-chat-template")
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ documents[0].text }}"
    answer = post(server, CHAT, chat_template=source, documents=[{"text": "doc"}], return_token_ids=True)
    assert answer["prompt_token_ids"] == token_ids(server, "<Hello>doc")
    assert refusal(server, chat_template="{% if %}")["param"] == "chat_template"


def test_what_openai_knows_and_we_do_not_need_is_accepted(null_server: RunningServer) -> None:
    post(null_server, CHAT, user="u", metadata={"a": "b"}, service_tier="auto", store=True, priority=-3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"priority": 2**31}, "priority"),
        ({"documents": "x"}, "documents"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"chat_template": ""}, "chat_template"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_a_bad_value_is_named(null_server: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert refusal(null_server, **fields)["param"] == param


def test_best_of_n_asks_for_nothing_more(null_server: RunningServer) -> None:
    assert len(post(null_server, COMPLETIONS, best_of=2, n=2)["choices"]) == 2
