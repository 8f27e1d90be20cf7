"""The shape of answers, streamed and whole, against a server whose text is known."""

from __future__ import annotations

import asyncio
import json
import sysconfig
from typing import Any

import httpx
import pytest

from ftserve.engine.checkpoint import resolve
from ftserve.engine.null import NULL_TEXT
from ftserve.preprocess.tokens import make_encoder
from tests.server.serving import MODEL, RunningServer, chat_body, completion_body, wait_until
from tests.server.sockets import Answer, Connection, head_and_body

PATHS = ("/v1/chat/completions", "/v1/completions")
SCRIPT_TOKENS = 150  # more than NULL_TEXT has, so the text starts again; characters of several tokens are in it


def body_for(path: str, **fields: object) -> dict[str, object]:
    return chat_body(**fields) if "chat" in path else completion_body(**fields)  # type: ignore[arg-type]


def post(server: RunningServer, path: str, **fields: object) -> dict[str, Any]:
    response = server.http.post(path, json=body_for(path, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: RunningServer, path: str, **fields: object) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer, having checked the frame around them."""
    response = server.http.post(path, json=body_for(path, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice of either endpoint, whole or a chunk's."""
    text: str = (
        choice["text"] if "text" in choice else choice.get("message", choice.get("delta", {})).get("content", "")
    )
    return text


def texts_of(chunks: list[dict[str, Any]], n: int = 1) -> list[str]:
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += text_of(choice)
    return texts


def finish_reasons(chunks: list[dict[str, Any]]) -> dict[int, list[str]]:
    reasons: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    return reasons


def test_a_chat_answer_has_openais_shape(null_server: RunningServer) -> None:
    answer = post(null_server, "/v1/chat/completions", max_tokens=7)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)
    assert NULL_TEXT.startswith(choice["message"]["content"])


def test_a_completion_has_openais_shape(null_server: RunningServer) -> None:
    answer = post(null_server, "/v1/completions", max_tokens=7)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert NULL_TEXT.startswith(choice["text"])


@pytest.mark.parametrize("path", PATHS)
def test_usage_adds_up(null_server: RunningServer, path: str) -> None:
    usage = post(null_server, path, max_tokens=7, n=3)["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["completion_tokens"] == 21
    assert usage["total_tokens"] == usage["prompt_tokens"] + 21
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_chat_stream_opens_with_the_role_and_ends_with_one_reason(null_server: RunningServer) -> None:
    chunks = stream(null_server, "/v1/chat/completions", max_tokens=20)
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", chunks[0]["created"], MODEL)
    }
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"].keys() == {"content"} and choice["delta"]["content"] for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_completion_stream_has_text_in_each_chunk_but_the_last(null_server: RunningServer) -> None:
    *chunks, last = stream(null_server, "/v1/completions", max_tokens=20)
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert all(chunk["choices"][0]["text"] for chunk in chunks)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])
def test_a_stream_has_no_usage_unless_asked(null_server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    """Case 8."""
    assert not any("usage" in chunk for chunk in stream(null_server, path, **fields))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "completion_tokens"),
    [({"max_tokens": 6}, 6), ({"max_tokens": 6, "n": 2}, 12), ({"max_tokens": 50, "stop": " took"}, 3)],
)
def test_include_usage_adds_exactly_one_last_chunk(
    null_server: RunningServer, path: str, fields: dict[str, Any], completion_tokens: int
) -> None:
    *chunks, last = stream(null_server, path, stream_options={"include_usage": True}, **fields)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] >= completion_tokens  # the engine may be ahead of a stop string
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 100, SCRIPT_TOKENS])
def test_the_streams_text_is_the_whole_answers(null_server: RunningServer, path: str, max_tokens: int) -> None:
    (whole,) = post(null_server, path, max_tokens=max_tokens)["choices"]
    chunks = stream(null_server, path, max_tokens=max_tokens)
    assert texts_of(chunks) == [text_of(whole)]
    assert finish_reasons(chunks) == {0: ["length"]}
    assert text_of(whole) in NULL_TEXT * 2


@pytest.mark.parametrize("path", PATHS)
def test_n_choices_are_numbered(null_server: RunningServer, path: str) -> None:
    whole = post(null_server, path, n=3)["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    chunks = stream(null_server, path, n=3)
    assert finish_reasons(chunks) == {0: ["length"], 1: ["length"], 2: ["length"]}
    assert texts_of(chunks, 3) == [text_of(choice) for choice in whole]


def test_each_choice_of_a_chat_stream_opens_with_the_role(null_server: RunningServer) -> None:
    chunks = stream(null_server, "/v1/chat/completions", n=3)
    for index in range(3):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])


@pytest.mark.parametrize("prompt", [["one", "two", "three"], [[1, 2, 3], [4], [5, 6]]])
def test_a_list_of_prompts_gets_n_choices_each(null_server: RunningServer, prompt: list[Any]) -> None:
    answer = post(null_server, "/v1/completions", prompt=prompt, n=2, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    assert answer["usage"]["completion_tokens"] == 24
    assert len(finish_reasons(stream(null_server, "/v1/completions", prompt=prompt, n=2))) == 6


def test_token_ids_are_counted_as_given(null_server: RunningServer) -> None:
    assert post(null_server, "/v1/completions", prompt=[1, 2, 3])["usage"]["prompt_tokens"] == 3
    assert post(null_server, "/v1/completions", prompt=[[1, 2], [3]])["usage"]["prompt_tokens"] == 3


STOPS = ["harbour", ["harbour", "Outside"], ["gull", "a crane"], "“Perhaps,”", ["no such text", " its mind"], " The"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stop", STOPS)
def test_text_ends_before_the_stop_that_comes_first(
    null_server: RunningServer, path: str, stop: str | list[str]
) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    first = min(at for s in stops if (at := NULL_TEXT.find(s)) >= 0)
    (whole,) = post(null_server, path, max_tokens=SCRIPT_TOKENS, stop=stop)["choices"]
    assert (text_of(whole), whole["finish_reason"]) == (NULL_TEXT[:first], "stop")
    chunks = stream(null_server, path, max_tokens=SCRIPT_TOKENS, stop=stop)
    assert (texts_of(chunks), finish_reasons(chunks)) == ([NULL_TEXT[:first]], {0: ["stop"]})


@pytest.mark.parametrize("path", PATHS)
def test_a_beginning_of_a_stop_that_never_comes_is_flushed(null_server: RunningServer, path: str) -> None:
    (plain,) = post(null_server, path, max_tokens=6)["choices"]
    stop = text_of(plain)[-5:] + " for ever"
    (whole,) = post(null_server, path, max_tokens=6, stop=stop)["choices"]
    assert (text_of(whole), whole["finish_reason"]) == (text_of(plain), "length")
    assert texts_of(stream(null_server, path, max_tokens=6, stop=stop)) == [text_of(plain)]


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(null_server: RunningServer) -> None:
    ids = make_encoder(resolve(MODEL) / "tokenizer.json", use_fastokens=False)(NULL_TEXT, False)
    (choice,) = post(null_server, "/v1/completions", max_tokens=100, stop_token_ids=[ids[3]])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" The answer took", "stop")


def test_max_completion_tokens_is_the_same_as_max_tokens(null_server: RunningServer) -> None:
    answer = post(null_server, "/v1/chat/completions", max_tokens=None, max_completion_tokens=9)
    assert answer["usage"]["completion_tokens"] == 9


def test_without_max_tokens_a_chat_fills_the_context_and_a_completion_makes_16(null_server: RunningServer) -> None:
    usage = post(null_server, "/v1/chat/completions", max_tokens=None)["usage"]
    assert usage["total_tokens"] == null_server.get("/v1/models").json()["data"][0]["max_model_len"]
    assert post(null_server, "/v1/completions", max_tokens=None)["usage"]["completion_tokens"] == 16


def test_models_are_listed_and_found(null_server: RunningServer) -> None:
    listed = null_server.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert null_server.get(f"/v1/models/{MODEL}").json() == model


def test_operations_answer(null_server: RunningServer) -> None:
    assert null_server.get("/health").json()["status"] == "ok"
    assert null_server.get("/ready").status_code == 200
    assert null_server.get("/version").json().keys() == {"version"}
    assert null_server.get("/health?probe=1").status_code == 200


def test_metrics_have_the_names_of_vllms_dashboards(null_server: RunningServer) -> None:
    before = null_server.metrics()
    post(null_server, "/v1/chat/completions", max_tokens=9)

    def grown(name: str) -> float:
        return null_server.metric(name) - before[f"ftserve_{name}"]

    # Recorded once the answer is out; so may be an earlier test's.
    wait_until(lambda: grown("e2e_request_latency_seconds_count") >= 1, "the request is recorded")
    wait_until(lambda: grown("generation_tokens_total") >= 9, "its tokens are recorded")
    assert grown("prompt_tokens_total") > 0
    assert grown("time_to_first_token_seconds_count") >= 1
    assert grown("inter_token_latency_seconds_count") >= 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "http_requests_inside"):
        assert null_server.metric(name) == 0
    assert null_server.metric("gil_enabled") == (0 if sysconfig.get_config_var("Py_GIL_DISABLED") else 1)


@pytest.mark.parametrize(
    "stage", ["read", "validate", "template", "tokenize", "inbox", "queue", "prefill", "decode", "deliver"]
)
def test_each_stage_of_a_request_is_measured(null_server: RunningServer, stage: str) -> None:
    before = null_server.metric(f'stage_seconds_count{{stage="{stage}"}}')
    null_server.chat()
    wait_until(lambda: null_server.metric(f'stage_seconds_count{{stage="{stage}"}}') > before, "it is recorded")


def test_a_request_id_comes_back_and_names_the_answer(null_server: RunningServer) -> None:
    response = null_server.http.post(PATHS[0], json=chat_body(), headers={"x-request-id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    assert response.json()["id"] == "chatcmpl-abc-123"
    assert null_server.get("/nowhere", headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"


@pytest.mark.parametrize("given", [b"", b"x" * 129, "naïve".encode(), b"a\tb"])
def test_a_request_id_that_cannot_be_used_is_replaced(null_server: RunningServer, given: bytes) -> None:
    made = null_server.get("/health", headers={b"x-request-id": given}).headers["x-request-id"]
    assert made.isalnum()
    assert made.encode() != given


def test_request_ids_are_made_and_differ(null_server: RunningServer) -> None:
    assert len({null_server.get("/health").headers["x-request-id"] for _ in range(10)}) == 10


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_unknown_paths_and_models_are_404(null_server: RunningServer) -> None:
    error_of(null_server.get("/v1/nothing"), 404)
    error_of(null_server.get("/v1/models/other"), 404)
    error = error_of(null_server.chat(model="gpt-5"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", PATHS[0]), ("GET", PATHS[1]), ("POST", "/health"), ("DELETE", "/v1/models")]
)
def test_a_wrong_method_is_405_and_says_which_is_right(null_server: RunningServer, method: str, path: str) -> None:
    response = null_server.http.request(method, path)
    error_of(response, 405)
    assert response.headers["allow"] in {"POST", "GET, HEAD"}


def test_a_body_of_unknown_length_is_411(null_server: RunningServer) -> None:
    body = json.dumps(chat_body()).encode()
    error_of(null_server.http.post(PATHS[0], content=iter([body]), headers={"content-type": "application/json"}), 411)


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"])
def test_another_content_type_is_415(null_server: RunningServer, content_type: str) -> None:
    body = json.dumps(chat_body())
    error_of(null_server.http.post(PATHS[0], content=body, headers={"content-type": content_type}), 415)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", None])
def test_json_is_taken_under_each_of_its_names(null_server: RunningServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = null_server.http.post(PATHS[0], content=json.dumps(chat_body()), headers=headers)
    assert response.status_code == 200, response.text


def test_a_client_that_expects_100_continue_gets_it(null_server: RunningServer) -> None:
    """As curl does with long bodies."""
    head, body = head_and_body(PATHS[1], completion_body(stream=True))

    async def ask() -> tuple[int, Answer]:
        async with await Connection.open(null_server.port) as connection:
            await connection.send(head[:-2] + b"expect: 100-continue\r\n\r\n")
            status, _ = await connection.read_head()
            await connection.send(body)
            return status, await connection.read_answer()

    status, answer = asyncio.run(ask())
    assert (status, answer.status, answer.events()[-1]) == (100, 200, "[DONE]")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_connection_that_asks_for_it_is_closed_after_the_answer(
    null_server: RunningServer, is_streamed: bool
) -> None:
    head, body = head_and_body(PATHS[0], chat_body(stream=is_streamed))

    async def ask() -> int:
        async with await Connection.open(null_server.port) as connection:
            await connection.send(head[:-2] + b"connection: close\r\n\r\n" + body)
            answer = await connection.read_answer()
            assert await connection.is_closed_by_peer()
            return answer.status

    assert asyncio.run(ask()) == 200


def test_head_is_get_without_the_body(null_server: RunningServer) -> None:
    response = null_server.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert null_server.http.head("/health").status_code == 200  # the connection is still in step
