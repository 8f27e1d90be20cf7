"""Tools and parsed answers as OpenAI's SDK uses them: scripted outputs, and real ones of the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.server.serving import MODEL, RunningServer

CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Rome", "unit": "celsius"}}\n</tool_call>'


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    friends: list[str] = Field(max_length=2)


WEATHER = GetWeather(city="Rome", unit="celsius")
TOOLS: Any = [openai.pydantic_function_tool(GetWeather)]


def asking(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(echo_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_gives_calls_as_models(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=asking(f"⟦Let me see.\n{CALL}⟧"), tools=TOOLS)
    (choice,) = answer.choices
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.parsed_arguments == WEATHER
    assert (choice.message.content, choice.finish_reason) == ("Let me see.\n", "tool_calls")


def test_parse_gives_content_as_a_model(client: OpenAI) -> None:
    says = '{"name": "Ann", "age": 7, "friends": []}'
    answer = client.chat.completions.parse(model=MODEL, messages=asking(f"⟦{says}⟧"), response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ann", age=7, friends=[])


def test_the_stream_helper_tells_of_calls(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=asking(f"⟦Hm.{CALL}{CALL}⟧"), tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [WEATHER, WEATHER]
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [WEATHER, WEATHER]
    assert len({call.id for call in calls}) == 2


def test_usage_comes_once_behind_a_call(client: OpenAI) -> None:  # case 9
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=asking(f"⟦{CALL}⟧"), tools=TOOLS, stream=True, stream_options=options
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


def test_a_whole_conversation_with_a_tool(client: OpenAI) -> None:
    messages = asking(f"⟦{CALL}⟧")
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "⟦Sunny.⟧"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "Sunny."


@pytest.mark.model
def test_the_default_model_makes_a_call_that_it_has_to_make(model_client: OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "GetWeather"}}):
        wanted: Any = choice
        answer = model_client.chat.completions.parse(
            model=MODEL, messages=asking("Weather in Rome?"), tools=TOOLS, tool_choice=wanted, max_tokens=80, seed=1
        )
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert isinstance(calls[0].function.parsed_arguments, GetWeather)


@pytest.mark.model
def test_the_default_model_answers_in_the_form_of_a_model(model_client: OpenAI) -> None:
    answer = model_client.chat.completions.parse(
        model=MODEL, messages=asking("Invent a person."), response_format=Person, max_tokens=120, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
