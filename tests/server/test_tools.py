"""Tool calls and thoughts through a running server, whole and streamed; outputs are scripted with `--null-echo`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.parsers.samples import BOTH, ROME_JSON, SAMPLES, SCHEMAS, Sample
from tests.server.serving import MODEL, RunningServer

TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
THOUGHT = "<think>\nHm: a thought.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture
def server(echo_server: RunningServer) -> RunningServer:
    return echo_server


def body(says: str, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"⟦{says}⟧"}], "max_tokens": 2000, **fields}


def whole(server: RunningServer, says: str, **fields: object) -> dict[str, Any]:
    answer = server.http.post("/v1/chat/completions", json=body(says, **fields))
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice | {"usage": answer.json()["usage"]}


def streamed(server: RunningServer, says: str, **fields: object) -> dict[str, Any]:
    """Return what the events of a stream add up to, and check their form."""
    answer = server.http.post("/v1/chat/completions", json=body(says, stream=True, **fields))
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": ""}
    reason = None
    for event in events[:-2]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"}
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": reason}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", ())
    functions = [call.get("function", call) for call in calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if sample.parser == "hermes"])
def test_streamed_and_whole_calls_are_the_same(server: RunningServer, sample: Sample) -> None:
    for answer in (whole, streamed):
        choice = answer(server, sample.text, tools=TOOLS)
        message = choice["message"]
        assert calls_of(choice) == sample.calls
        assert (message["content"] or "") == sample.content
        assert choice["finish_reason"] == ("tool_calls" if sample.calls else "stop")


def test_without_tools_or_with_none_a_call_is_text(server: RunningServer) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = whole(server, CALL, **fields)
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


def test_thoughts_are_told_from_the_answer(server: RunningServer) -> None:
    for answer in (whole, streamed):
        choice = answer(server, f"{THOUGHT}So.\n{CALL}", tools=TOOLS)
        assert choice["message"]["reasoning_content"] == "Hm: a thought."
        assert choice["message"]["content"] == "So.\n"
        assert calls_of(choice) == [("get_time", {})]
    details = whole(server, f"{THOUGHT}So.")["usage"]["completion_tokens_details"]
    assert 5 < details["reasoning_tokens"] < 15


def test_a_thought_that_is_cut_off_is_a_thought(server: RunningServer) -> None:
    choice = whole(server, "<think>\nNever ends", max_tokens=5)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"].startswith("Nev")


def test_a_named_choice_takes_all_of_the_output_for_arguments(server: RunningServer) -> None:
    choice_of = {"type": "function", "function": {"name": "get_weather"}}
    for answer in (whole, streamed):
        choice = answer(server, ROME_JSON, tools=TOOLS, tool_choice=choice_of)
        assert calls_of(choice) == [("get_weather", json.loads(ROME_JSON))]
        assert choice["finish_reason"] == "stop"


def test_a_required_choice_is_an_array_of_calls(server: RunningServer) -> None:
    says = json.dumps([{"name": name, "arguments": arguments} for name, arguments in BOTH])
    for answer in (whole, streamed):
        choice = answer(server, THOUGHT + says, tools=TOOLS, tool_choice="required")
        assert calls_of(choice) == BOTH
        assert choice["finish_reason"] == "tool_calls"


def test_one_call_at_a_time_ends_after_the_first(server: RunningServer) -> None:
    choice = whole(server, f"{CALL}\n{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == [("get_time", {})]
    assert choice["finish_reason"] == "tool_calls"


def test_stop_strings_leave_calls_and_thoughts_alone(server: RunningServer) -> None:
    choice = whole(server, f"<think>get_time</think>It is{CALL}", tools=TOOLS, stop=["get_time"])
    assert choice["message"]["reasoning_content"] == "get_time"
    assert calls_of(choice) == [("get_time", {})]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0.function"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_a_refusal_names_the_field(server: RunningServer, fields: dict[str, object], param: str) -> None:
    answer = server.http.post("/v1/chat/completions", json=body("x") | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_a_conversation_with_calls_is_taken(server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What time is it?"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "tool_calls": [call], "reasoning": "why"},
        {"role": "tool", "tool_call_id": "call_1", "content": "⟦Noon.⟧"},
    ]
    answer = server.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 20}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "Noon."


def test_the_parsers_are_said_at_the_start(server: RunningServer) -> None:
    assert "tool calls hermes, thoughts think" in server.log()


def test_many_chats_with_tools_and_bad_words_share_one_tokenizer(server: RunningServer) -> None:  # case 15
    def ask(number: int) -> tuple[int, list[tuple[str, Any]]]:
        fields: dict[str, Any] = {"tools": TOOLS, "bad_words": [f"word{number}"], "logprobs": number % 2 == 0}
        choice = (whole, streamed)[number % 3 == 0](server, f"{number} {CALL}", **fields)
        return int(choice["message"]["content"]), calls_of(choice)

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(ask, range(200)))
    assert found == [(number, [("get_time", {})]) for number in range(200)]
