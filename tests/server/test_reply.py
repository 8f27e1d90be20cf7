"""Streamed and whole answers are the same text, however the tokens come."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ftserve.engine.errors import EngineRequestError
from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from ftserve.preprocess.text import StopMatcher
from ftserve.server.chat import ChatFormat
from ftserve.server.completions import CompletionFormat
from ftserve.server.logprobs import Scores
from ftserve.server.reply import Reply
from ftserve.server.rich import RichOptions
from tests.preprocess.test_text import BYTE_FALLBACK, BYTE_LEVEL, OPAQUE

VOCABULARIES = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK, "opaque": OPAQUE}


class Transport:
    def __init__(self) -> None:
        self.sent: list[str] = []

    def send_str(self, text: str) -> None:
        self.sent.append(text)


class RecordingExchange:
    """Stands for the HTTP side."""

    request_id = "r1"
    is_cancelled = False

    def __init__(self) -> None:
        self.transport = Transport()
        self.answer: tuple[int, str] | None = None
        self.ends = 0

    def open_stream(self, headers: object) -> Transport:
        return self.transport

    def respond(self, status: int, headers: object, body: str) -> None:
        assert self.answer is None
        self.answer = (status, body)
        self.ends += 1

    def refuse(self, problem: Any) -> None:
        self.respond(problem.status, problem.headers(), problem.body())

    def cancel(self) -> None:
        self.is_cancelled = True

    def end(self) -> None:
        self.ends += 1


class CancelRecorder:
    """Stands for the engine client."""

    def __init__(self) -> None:
        self.cancelled: list[GenerationRequest] = []

    def cancel(self, request: GenerationRequest) -> None:
        self.cancelled.append(request)


class Run:
    """One reply fed with scripted events."""

    def __init__(
        self,
        *,
        n: int = 1,
        stream: bool,
        kind: str = "byte_level",
        stop: tuple[str, ...] = (),
        chat: bool = True,
        usage: bool = False,
        scores: Scores | None = None,
        rich: RichOptions | None = None,
    ) -> None:
        self.exchange, self.engine = RecordingExchange(), CancelRecorder()
        vocabulary = VOCABULARIES[kind]
        form = (ChatFormat if chat else CompletionFormat)("r1", "m", include_usage=usage, scores=scores)
        self.reply = Reply(
            self.exchange,  # type: ignore[arg-type]  # it has what a reply asks for
            self.engine,  # type: ignore[arg-type]  # as above
            form,
            vocabulary,
            is_streamed=stream,
            include_usage=usage,
            max_bytes=1 << 30,
        )
        sampling = SamplingParams(max_tokens=1000, stop=stop)
        self.requests = [
            GenerationRequest(request_id="r1", index=k, prompt_ids=(1, 2), sampling=sampling, lane=0, route=self.reply)
            for k in range(n)
        ]
        self.reply.expect(self.requests, vocabulary, 2, rich)

    def feed(self, *events: TokenEvent) -> None:
        fed = [self.reply.feed(event) for event in events]  # all of them, before the one flush
        if any(fed):
            self.reply.flush()

    def chunks(self) -> list[dict[str, Any]]:
        text = "".join(self.exchange.transport.sent)
        events = text.split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def streamed_texts(self, n: int) -> list[str]:
        texts = [""] * n
        for chunk in self.chunks():
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                texts[choice["index"]] += piece
        return texts

    def whole_texts(self) -> list[str]:
        assert self.exchange.answer is not None
        status, body = self.exchange.answer
        assert status == 200
        choices = json.loads(body)["choices"]
        return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def play(run: Run, scripts: list[list[int]], seed: int) -> None:
    """Feed each choice its tokens in random groups and random batches, then its end."""
    rng = random.Random(seed)
    left = {k: list(script) for k, script in enumerate(scripts)}
    batch: list[TokenEvent] = []
    while left:
        k = rng.choice(list(left))
        size = rng.randint(1, 3)
        ids, left[k] = left[k][:size], left[k][size:]
        end = None if left[k] else FinishReason.LENGTH
        batch.append(TokenEvent(run.requests[k], tuple(ids), end))
        if end:
            del left[k]
        if rng.random() < 0.6:
            run.feed(*batch)
            batch = []
    run.feed(*batch)


@given(data=st.data(), kind=st.sampled_from(sorted(VOCABULARIES)), chat=st.booleans(), seed=st.integers(0, 10**6))
def test_streamed_text_equals_whole_text(data: st.DataObject, kind: str, chat: bool, seed: int) -> None:
    size = len(VOCABULARIES[kind])
    scripts = data.draw(st.lists(st.lists(st.integers(0, size - 1), min_size=1, max_size=15), min_size=1, max_size=3))
    stop = tuple(data.draw(st.lists(st.text("the answ.", min_size=1, max_size=4), max_size=2)))
    n = len(scripts)
    streamed, whole = (Run(n=n, stream=stream, kind=kind, stop=stop, chat=chat) for stream in (True, False))
    play(streamed, scripts, seed)
    play(whole, scripts, seed + 1)
    assert streamed.streamed_texts(n) == whole.whole_texts()
    assert streamed.exchange.ends == whole.exchange.ends - 1 == 1  # `respond` ends too
    for text, script in zip(whole.whole_texts(), scripts, strict=True):
        assert text == expected_text(kind, script, stop)


def expected_text(kind: str, script: list[int], stop: tuple[str, ...]) -> str:
    vocabulary = VOCABULARIES[kind]
    text: str = vocabulary.tokenizer.decode(script, skip_special_tokens=True)
    if kind == "byte_fallback":  # differs from the decoder for byte runs that are no UTF-8, as documented
        from tests.preprocess.test_text import detokenize

        text = detokenize(vocabulary, [script])
    if not stop:
        return text
    matcher = StopMatcher(stop)
    return matcher.push(text) + ("" if matcher.matched else matcher.flush())


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_a_stream_opens_with_the_role_and_ends_with_one_reason() -> None:
    run = Run(stream=True)
    run.feed(TokenEvent(run.requests[0], ids("He")))
    run.feed(TokenEvent(run.requests[0], ids("y"), FinishReason.STOP))
    deltas = [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in run.chunks()]
    assert deltas == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "He"}, None),
        ({"content": "y"}, None),
        ({}, "stop"),
    ]
    assert all("usage" not in chunk for chunk in run.chunks())


def test_usage_comes_once_and_last_with_null_before() -> None:  # case 9
    run = Run(stream=True, usage=True, n=2)
    for request in run.requests:
        run.feed(TokenEvent(request, ids("ab"), FinishReason.LENGTH))
    *others, last = run.chunks()
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_no_delta_is_empty() -> None:
    run = Run(stream=True)
    run.feed(TokenEvent(run.requests[0], (0xF0,)))
    run.feed(TokenEvent(run.requests[0], (0x9F, 0x99)))
    run.feed(TokenEvent(run.requests[0], (0x82,), FinishReason.LENGTH))
    contents = [c["choices"][0]["delta"].get("content") for c in run.chunks()]
    assert contents == ["", "🙂", None]


def test_a_stop_string_cancels_the_sequence_and_later_tokens_do_not_count() -> None:
    run = Run(stream=True, stop=("END",), usage=True)
    run.feed(TokenEvent(run.requests[0], ids("the EN")))
    run.feed(TokenEvent(run.requests[0], ids("D")))
    run.feed(TokenEvent(run.requests[0], ids("more")), TokenEvent(run.requests[0], (), FinishReason.CANCELLED))
    assert run.engine.cancelled == run.requests
    assert run.streamed_texts(1) == ["the "]
    assert run.chunks()[-1]["usage"]["completion_tokens"] == 7
    assert run.exchange.ends == 1


def test_the_stop_token_is_counted_and_is_no_text() -> None:
    run = Run(stream=False)
    run.feed(TokenEvent(run.requests[0], ids("ab"), FinishReason.STOP, stop_token_id=ord("b")))
    assert run.whole_texts() == ["a"]


def test_an_error_before_the_first_token_is_an_http_error() -> None:  # case 10
    for stream in (True, False):
        run = Run(stream=stream)
        run.feed(TokenEvent(run.requests[0], (), FinishReason.ERROR, error=EngineRequestError("no luck")))
        assert run.exchange.answer is not None
        assert run.exchange.answer[0] == 500
        assert "no luck" in run.exchange.answer[1]


def test_an_error_after_the_first_token_is_an_event_and_ends_all_choices() -> None:
    run = Run(stream=True, n=2)
    run.feed(TokenEvent(run.requests[0], ids("ab")))
    run.feed(TokenEvent(run.requests[1], (), FinishReason.ERROR, error=EngineRequestError("no luck")))
    run.feed(TokenEvent(run.requests[0], (), FinishReason.CANCELLED))
    assert run.chunks()[-1]["error"]["message"] == "no luck"
    assert run.engine.cancelled == [run.requests[0]]
    assert run.exchange.ends == 1


def test_foreign_errors_do_not_reach_the_client() -> None:
    run = Run(stream=False)
    run.feed(TokenEvent(run.requests[0], (), FinishReason.ERROR, error=RuntimeError("/secret/path")))
    assert run.exchange.answer is not None
    assert "/secret" not in run.exchange.answer[1]
