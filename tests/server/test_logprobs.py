"""Log-probabilities as clients see them."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs
from ftserve.server.logprobs import Scores, TokenTexts, prompt_tokens
from ftserve.server.rich import RichOptions
from tests.preprocess.test_text import BYTE_FALLBACK, BYTE_LEVEL, grouped, token_id
from tests.server.serving import RunningServer, chat_body, completion_body
from tests.server.test_reply import VOCABULARIES, Run

TEXTS = {kind: TokenTexts(vocabulary) for kind, vocabulary in VOCABULARIES.items()}


def score(token_id: int, size: int, count: int) -> TokenLogprobs:
    """Return made-up numbers of a token that depend on nothing but it."""
    rng = random.Random(token_id)
    top = rng.sample(range(size), min(count, size))
    numbers = sorted((-10 * rng.random() for _ in top), reverse=True)
    return TokenLogprobs(token_id, -3.5 if token_id % 7 else -math.inf, 9, top, numbers)


def play(run: Run, kind: str, scripts: list[list[int]], seed: int, count: int) -> None:
    """Feed each choice its tokens in random groups, then its end."""
    size = len(VOCABULARIES[kind])
    for request, script in zip(run.requests, scripts, strict=True):
        groups = grouped(script, seed)
        for at, group in enumerate(groups):
            end = FinishReason.LENGTH if at == len(groups) - 1 else None
            run.feed(TokenEvent(request, group, end, logprobs=[score(k, size, count) for k in group]))


def joined(logprobs: list[dict[str, list[Any]] | None]) -> dict[str, list[Any]]:
    """Return the `logprobs` of chunks put together."""
    found: dict[str, list[Any]] = {}
    for part in logprobs:
        for name, values in (part or {}).items():
            if values is not None:
                found.setdefault(name, []).extend(values)
    return found


@given(data=st.data(), kind=st.sampled_from(sorted(VOCABULARIES)), chat=st.booleans(), seed=st.integers(0, 10**6))
def test_streamed_logprobs_equal_whole_ones(data: st.DataObject, kind: str, chat: bool, seed: int) -> None:
    size = len(VOCABULARIES[kind])
    scripts = data.draw(st.lists(st.lists(st.integers(0, size - 1), min_size=1, max_size=15), min_size=1, max_size=3))
    stop = tuple(data.draw(st.lists(st.text("the answ.", min_size=1, max_size=4), max_size=2)))
    count = data.draw(st.integers(0, 4))
    scores, rich = Scores(TEXTS[kind], count, None), RichOptions(keeps_tokens=True)
    streamed, whole = (
        Run(n=len(scripts), stream=stream, kind=kind, stop=stop, chat=chat, scores=scores, rich=rich)
        for stream in (True, False)
    )
    play(streamed, kind, scripts, seed, count)
    play(whole, kind, scripts, seed + 1, count)
    assert streamed.streamed_texts(len(scripts)) == whole.whole_texts()
    assert whole.exchange.answer is not None
    for choice in json.loads(whole.exchange.answer[1])["choices"]:
        chunks = [c for chunk in streamed.chunks() for c in chunk["choices"] if c["index"] == choice["index"]]
        expected = joined([choice["logprobs"]])
        assert joined([chunk.get("logprobs") for chunk in chunks]) == expected
        tokens = expected["content" if chat else "tokens"]
        script = scripts[choice["index"]]
        assert len(tokens) == len(script) or (stop and len(tokens) <= len(script))


@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), min_size=1, max_size=15))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(ids: list[int]) -> None:
    entries = json.loads(Scores(TEXTS["byte_level"], 0, None).of_chat(tokens_of(ids)))["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in entries if entry["token"] != "<|end|>")
    assert data.decode(errors="replace") == BYTE_LEVEL.tokenizer.decode(ids, skip_special_tokens=True)


def tokens_of(ids: list[int], size: int = 10, count: int = 0) -> Any:
    from ftserve.preprocess.text import make_detokenizer
    from ftserve.server.rich import Message, RichText

    request = GenerationRequest(
        request_id="r", index=0, prompt_ids=(1,), sampling=SamplingParams(max_tokens=9), lane=0, route=None
    )
    rich = RichText(RichOptions(keeps_tokens=True), make_detokenizer(BYTE_LEVEL), None)
    rich.push(ids, TokenEvent(request, ids, logprobs=[score(k, size, count) for k in ids]))
    rich.finish()
    return Message.of(rich.take()).tokens


def test_halves_of_a_character_are_written_as_bytes() -> None:
    ids = [token_id(BYTE_LEVEL, name) for name in ("ðŁ", "ĻĤĠis", "<|end|>")]
    tokens = tokens_of(ids)
    scores = Scores(TEXTS["byte_level"], 0, None)
    assert [(e["token"], e["bytes"]) for e in json.loads(scores.of_chat(tokens))["content"]] == [
        (r"\xf0\x9f", [0xF0, 0x9F]),
        (r"\x99\x82 is", [0x99, 0x82, *b" is"]),
        ("<|end|>", [*b"<|end|>"]),
    ]
    legacy = json.loads(scores.of_completion(tokens))
    assert legacy["tokens"] == [r"bytes:\xf0\x9f", r"bytes:\x99\x82 is", "<|end|>"]
    assert legacy["text_offset"] == [0, 0, 4]


def test_a_byte_token_and_a_space_of_sentencepiece() -> None:
    texts = TEXTS["byte_fallback"]
    assert texts.members(token_id(BYTE_FALLBACK, "<0xC3>")) == r'"token":"\\xc3","bytes":[195]'
    assert texts.members(token_id(BYTE_FALLBACK, "▁the")) == '"token":" the","bytes":[32,116,104,101]'


def test_top_tokens_keep_their_duplicates_in_chats_and_not_in_completions() -> None:
    tokens = tokens_of([ord("a")])
    twice = TokenLogprobs(ord("a"), -2.0, 3, [ord("b"), ord("b"), ord("c")], [-0.5, -1.0, -math.inf])
    tokens = [tokens[0]._replace(logprobs=twice)]
    scores = Scores(TEXTS["byte_level"], 3, None)
    [entry] = json.loads(scores.of_chat(tokens))["content"]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("b", -0.5),
        ("b", -1.0),
        ("c", -9999.0),
    ]
    assert json.loads(scores.of_completion(tokens))["top_logprobs"] == [{"b": -0.5, "c": -9999.0, "a": -2.0}]


def test_offsets_of_an_echoed_prompt() -> None:
    ids = [
        token_id(BYTE_FALLBACK, name)
        for name in ("</s>", "▁the", "▁", "é", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", ".")
    ]
    request = GenerationRequest(
        request_id="r", index=0, prompt_ids=ids, sampling=SamplingParams(max_tokens=9), lane=0, route=None
    )
    tokens = prompt_tokens(request, [None, *(score(k, 10, 0) for k in ids[1:])], "the é🙂.", TEXTS["byte_fallback"])
    assert [token.offset for token in tokens] == [0, 0, 3, 4, 5, 5, 5, 5, 6]
    assert tokens[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_chat_over_http(null_server: RunningServer, stream: bool) -> None:
    body = chat_body(logprobs=True, top_logprobs=2, max_tokens=8, stream=stream, n=2)
    response = null_server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    for choice in (0, 1):
        if stream:
            chunks = [json.loads(e[6:]) for e in response.text.split("\n\n") if e.startswith("data: {")]
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
            text = "".join(part["delta"].get("content", "") for part in parts)
            content = joined([part.get("logprobs") for part in parts])["content"]
        else:
            answer = response.json()["choices"][choice]
            text, content = answer["message"]["content"], answer["logprobs"]["content"]
        assert len(content) == 8
        assert "".join(entry["token"] for entry in content) == text
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == 0 for entry in content)


def test_completion_with_echo_over_http(null_server: RunningServer) -> None:
    body = completion_body(
        prompt="Once upon a <|im_start|>time", logprobs=1, echo=True, max_tokens=4, prompt_logprobs=0
    )
    response = null_server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Once upon a <|im_start|>time")
    assert "".join(logprobs["tokens"]) == choice["text"]
    starts = [sum(map(len, logprobs["tokens"][:k])) for k in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == starts
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == response.json()["usage"]["prompt_tokens"] == len(starts) - 4
    assert all(len(entry) == 1 for entry in choice["prompt_logprobs"][1:])


def test_prompt_logprobs_of_a_chat(null_server: RunningServer) -> None:
    answer = null_server.http.post("/v1/chat/completions", json=chat_body(prompt_logprobs=2, n=2)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all("decoded_token" in score for entry in answer["prompt_logprobs"][1:] for score in entry.values())
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
    ],
)
def test_more_than_allowed_is_refused(
    null_server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat_body(**fields) if "chat" in path else completion_body(**fields)
    response = null_server.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
