"""The newest OpenAI SDK against a running server, as its users call it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.serving import MODEL, RunningServer

HELLO = [{"role": "user", "content": "Hello"}]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(null_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{null_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_text(client: OpenAI, messages: list[dict[str, str]], **fields: object) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=messages, **fields)  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def chat_stream_text(client: OpenAI, messages: list[dict[str, str]], **fields: object) -> str:
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **fields)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    text = chat_text(client, HELLO, max_tokens=50)
    assert len(text) > 50
    assert chat_stream_text(client, HELLO, max_tokens=50) == text


def test_completions_are_the_same_whole_and_streamed(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=30)
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=7,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 14
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


def test_the_stream_helper_collects_the_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=100, stop="short"
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat_text(client, HELLO, max_tokens=100, stop="short")


def test_errors_are_the_sdks_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        chat_text(client, HELLO, temperature=5)
    assert caught.value.param == "temperature"


def test_the_request_id_is_there(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert answer.request_id == "mine"


def test_a_hundred_streams_at_once_from_the_async_client(null_server: RunningServer) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{null_server.url}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=40, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(100)))

    assert len(set(asyncio.run(run()))) == 1


def test_a_client_that_stops_reading_frees_its_sequence(null_server: RunningServer, tmp_path: Path) -> None:
    with RunningServer(tmp_path / "log", "--engine", "null", "--null-step-ms", "2") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=5000, stream=True
        )
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
        stream.close()
        client.close()
        while not server.is_idle():
            pass


@pytest.mark.model
def test_embeddings_are_the_same_as_floats_and_as_base64(tmp_path: Path) -> None:
    """The SDK asks for base64 unless told otherwise."""
    with (
        RunningServer(tmp_path / "log", "all-minilm-l6-v2", "--torch-threads", "1") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        texts = ["A cat sits on the mat.", "Interest rates rose."]
        usual = client.embeddings.create(model="all-minilm-l6-v2", input=texts)
        floats = client.embeddings.create(model="all-minilm-l6-v2", input=texts, encoding_format="float", dimensions=8)
        assert [len(item.embedding) for item in usual.data] == [384, 384]
        assert [len(item.embedding) for item in floats.data] == [8, 8]
        assert abs(sum(x * x for x in usual.data[0].embedding) - 1) < 1e-3
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="all-minilm-l6-v2", messages=[{"role": "user", "content": "x"}])


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france(model_client: OpenAI) -> None:
    assert "Paris" in chat_text(model_client, FRANCE, temperature=0, max_tokens=24)


@pytest.mark.model
def test_the_default_model_says_the_same_whole_and_streamed(model_client: OpenAI) -> None:
    text = chat_text(model_client, FRANCE, temperature=0, max_tokens=24)
    assert chat_stream_text(model_client, FRANCE, temperature=0, max_tokens=24) == text


@pytest.mark.model
def test_a_seed_gives_the_same_text(model_client: OpenAI) -> None:
    first, second = (chat_text(model_client, FRANCE, temperature=1.0, seed=7, max_tokens=16) for _ in range(2))
    assert first == second


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: Annotated[int, pydantic.Field(ge=0, le=120)]
    role: Literal["cook", "pilot"]


@pytest.mark.model
def test_an_answer_is_parsed_into_a_model(model_client: OpenAI) -> None:
    answer = model_client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.model
def test_a_stream_is_parsed_into_a_model(model_client: OpenAI) -> None:
    with model_client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, max_tokens=100
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)


def test_logprobs_are_read(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=9, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 9
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for part in parts if part for entry in part.content or ()] == logprobs.content
    completion = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=3, logprobs=2, echo=True)
    old = completion.choices[0].logprobs
    assert old is not None
    assert old.tokens is not None
    assert "".join(old.tokens) == completion.choices[0].text
