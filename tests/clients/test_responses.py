"""The Responses API as OpenAI's own SDK uses it; outputs are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.serving import MODEL, NULL_ENGINE, RunningServer, wait_until

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(echo_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: OpenAI, says: str, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=f"⟦{says}⟧", **fields)


def test_text_and_usage(client: OpenAI) -> None:
    response = create(client, "Hello there.", instructions="Be kind.", metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == ("Hello there.", "completed", {"a": "b"})
    assert response.usage.output_tokens > 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_response_is_kept_and_deleted(client: OpenAI) -> None:
    response = create(client, "Keep me.")
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(create(client, "x", store=False).id)


def test_a_response_follows_another(client: OpenAI) -> None:
    first = create(client, "Blue.")
    second = client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
    assert second.output_text == "Blue."  # the first exchange is in the prompt
    assert second.usage is not None
    assert first.usage.input_tokens + 5 < second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id"


def test_events_come_in_order_and_are_numbered(client: OpenAI) -> None:
    says = f"<think>\nHm.\n</think>\nSo.{CALL}"
    stream: Any = create(client, says, tools=[TOOL], stream=True)
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1].response
    whole = create(client, says, tools=[TOOL])
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    for streamed, other in zip(final.output, whole.output, strict=True):
        different = {"id", "call_id"}
        assert {k: v for k, v in streamed.to_dict().items() if k not in different} == {
            k: v for k, v in other.to_dict().items() if k not in different
        }
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(deltas) == json.loads(final.output[2].arguments) == {"city": "Rome"}
    assert client.responses.retrieve(final.id).to_dict() == final.to_dict()
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_a_call_is_answered(client: OpenAI) -> None:
    first = create(client, CALL, tools=[TOOL])
    (call,) = first.output
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "⟦Sunny.⟧"}
    assert (
        client.responses.create(model=MODEL, input=[output], previous_response_id=first.id, tools=[TOOL]).output_text
        == "Sunny."
    )
    items: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), output]
    assert client.responses.create(model=MODEL, input=items, tools=[TOOL]).output_text == "Sunny."


def test_the_stream_helper_parses(client: OpenAI) -> None:
    class City(BaseModel):
        name: str
        people: int

    says = '{"name": "Rome", "people": 3}'
    with client.responses.stream(model=MODEL, input=f"⟦{says}⟧", text_format=City) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == City(name="Rome", people=3)
    parsed = client.responses.parse(model=MODEL, input=f"⟦{says}⟧", text_format=City)
    assert parsed.output_parsed == City(name="Rome", people=3)


def test_an_output_that_is_cut_is_incomplete(client: OpenAI) -> None:
    for stream in (False, True):
        answer: Any = create(client, "one two three four five", max_output_tokens=2, stream=stream)
        response = list(answer)[-1].response if stream else answer
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "always"}, "truncation"),
        ({"temperature": 7}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ],
)
def test_what_is_not_built_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "x", **fields})
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_a_running_response_can_be_cancelled(tmp_path: Path) -> None:
    with (
        RunningServer(tmp_path / "log", *NULL_ENGINE, "--null-step-ms", "5") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.responses.create(model=MODEL, input="x", stream=True)
        created: Any = next(iter(stream))
        assert client.responses.retrieve(created.response.id).status == "in_progress"
        assert client.responses.cancel(created.response.id).status == "cancelled"
        last: Any = list(stream)[-1]
        assert (last.type, last.response.status) == ("response.failed", "cancelled")
        assert client.responses.retrieve(created.response.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(created.response.id)
        wait_until(server.is_idle, "idle")


def test_a_server_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    arguments = (*NULL_ENGINE, "--response-store-mb", "0")
    with (
        RunningServer(tmp_path / "log", *arguments) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        response = client.responses.create(model=MODEL, input="x", max_output_tokens=3)
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            client.responses.create(model=MODEL, input="x", previous_response_id=response.id)
