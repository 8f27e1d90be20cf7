"""What operators and tools use beside generation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.serving import MODEL, RunningServer, chat_body, completion_body, wait_until

Start = Callable[..., RunningServer]


def test_a_text_survives_tokenize_and_detokenize(null_server: RunningServer) -> None:
    text = "Grüße, 12 times — 🙂\n"
    answer = null_server.http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = null_server.http.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokenized_messages_are_what_a_chat_is_charged_for(null_server: RunningServer) -> None:
    body = chat_body("How many?")
    count = null_server.http.post("/tokenize", json={"messages": body["messages"]}).json()["count"]
    usage = null_server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == count


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": 5}])
def test_tokenize_refuses_what_is_neither_text_nor_messages(null_server: RunningServer, body: object) -> None:
    assert null_server.http.post("/tokenize", json=body).status_code == 400


def test_detokenize_refuses_ids_outside_the_vocabulary(null_server: RunningServer) -> None:
    answer = null_server.http.post("/detokenize", json={"tokens": [10**8]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"


def test_ping_and_load_answer(null_server: RunningServer) -> None:
    assert null_server.get("/ping").status_code == 200
    assert null_server.get("/load").json()["num_requests_running"] == 0


def test_whole_answers_tell_where_their_time_went(null_server: RunningServer) -> None:
    timing = null_server.complete().headers["server-timing"]
    stages = dict(part.split(";dur=") for part in timing.split(", "))
    assert list(stages) == ["read", "preprocess", "queue", "prefill", "decode"]
    assert all(float(value) >= 0 for value in stages.values())


def test_keys_open_every_path_but_the_probes(start_server: Start) -> None:
    server = start_server("--api-key", "first", "--api-key", "second")
    assert server.get("/v1/models").status_code == 401
    assert server.complete().json()["error"]["type"] == "authentication_error"
    for key, status in (("first", 200), ("second", 200), ("firs", 401), ("é", 401)):
        headers = {b"authorization": f"Bearer {key}".encode()}
        answer = server.http.post("/v1/completions", json=completion_body(), headers=headers)
        assert answer.status_code == status
    assert {server.get(path).status_code for path in ("/health", "/ready", "/ping")} == {200}


def test_keys_come_from_the_environment_too(start_server: Start) -> None:
    server = start_server(env={"FTSERVE_API_KEY": "one,two"})
    assert server.get("/version").status_code == 401
    assert server.get("/version", headers={"authorization": "Bearer two"}).status_code == 200


def test_echo_puts_the_prompt_first_and_counts_no_token_for_it(null_server: RunningServer) -> None:
    ids = null_server.http.post("/tokenize", json={"prompt": "Once 1"}).json()["tokens"]
    for prompt in ("Once 1", ["Once 1"], ids):
        plain, echoed = (null_server.complete(prompt, echo=echo).json() for echo in (False, True))
        assert echoed["choices"][0]["text"] == "Once 1" + plain["choices"][0]["text"]
        assert echoed["usage"] == plain["usage"]


def test_a_stop_string_is_named_and_kept_where_asked(null_server: RunningServer) -> None:
    for include in (False, True):
        answer = null_server.complete(max_tokens=50, stop=["zzz", "while"], include_stop_str_in_output=include).json()
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "while")
        assert choice["text"] == " The answer took a " + "while" * include


def test_a_stop_token_is_named(null_server: RunningServer) -> None:
    token_id = null_server.http.post("/tokenize", json={"prompt": " answer"}).json()["tokens"][0]
    choice = null_server.chat(stop_token_ids=[token_id]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", token_id, " The")


@pytest.mark.parametrize("bias", [{"x": 1}, {"1": 101}, {"1": "a"}, {"99999999": 1}, {"-1": 1}, [1]])
def test_a_wrong_logit_bias_is_refused_by_name(null_server: RunningServer, bias: object) -> None:
    answer = null_server.chat(logit_bias=bias)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("logit_bias")


def test_two_devices_are_two_engines_that_share_the_work(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--device", "cpu,cpu", "--null-step-ms", "5", "--max-num-seqs", "2")
    assert ", 2 engine;" in server.log()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(server.chat, f"{k} words", max_tokens=400) for k in range(4)]
        wait_until(lambda: server.metric("num_requests_running") == 4, "two run on each")
        assert all(future.result().status_code == 200 for future in futures)
    wait_until(server.is_idle, "all are out")
