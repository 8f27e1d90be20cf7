"""What is accepted from clients, and how a refusal names the field."""

from __future__ import annotations

import json

import pytest

from ftserve.engine.errors import InvalidRequestError
from ftserve.server.wire import ChatRequest, CompletionRequest, parse, text_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**CHAT, **fields}).encode())


def test_defaults_ask_for_nothing() -> None:
    fields = chat()
    assert (fields.max_tokens, fields.temperature, fields.stop_strings(), fields.wants_usage()) == (
        None,
        None,
        (),
        False,
    )


def test_unknown_fields_are_ignored() -> None:
    chat(invented={"deep": [1]}, user="u", metadata={"a": "b"})


def test_integers_are_good_floats() -> None:
    assert chat(temperature=1).temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 1_000_000_000}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**32]}, "stop_token_ids"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": {"triggers": []}}}, "structured_outputs.structural_tag"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (["a", "b", "c", "d", "e"], "'stop': List should have at most 4 items, not 5."),
        (["a", 1], "'stop.1'"),
        (5, "'stop'"),
    ],
)
def test_of_a_fields_forms_the_refusal_means_the_one_that_was_tried(stop: object, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(stop=stop)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'"str"',
        b"[1]",
        b"42",
        b"null",
        b"true",
        b"",
        b"{",
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b'{"model": "\xff"}',
        b"\xff\xfe",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:  # case 12
    with pytest.raises(InvalidRequestError) as caught:
        parse(ChatRequest, body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_have_four_forms(prompt: object) -> None:
    assert parse(CompletionRequest, json.dumps({"model": "m", "prompt": prompt}).encode()).prompt == prompt


@pytest.mark.parametrize("prompt", [None, 5, [[]], [1, "a"], [-1], [1.5], {"a": 1}])
def test_other_prompts_are_refused(prompt: object) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    with pytest.raises(InvalidRequestError, match="prompt"):
        parse(CompletionRequest, body)


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of(chat(messages=[{"role": "user", "content": parts}]).messages) == [
        {"role": "user", "content": "a\nb"}
    ]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(InvalidRequestError, match="image_url"):  # case 16
        text_of(chat(messages=[{"role": "user", "content": image}]).messages)
