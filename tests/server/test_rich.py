"""What a choice carries besides text does not depend on how its tokens are grouped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftserve.engine.types import GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs
from ftserve.preprocess.text import StopMatcher, make_detokenizer
from ftserve.server.rich import Delta, Kind, Message, Piece, RichOptions, RichText
from tests.preprocess.test_text import BYTE_FALLBACK, BYTE_LEVEL, OPAQUE, grouped, token_id

VOCABULARIES = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK, "opaque": OPAQUE}
REQUEST = GenerationRequest(
    request_id="r", index=0, prompt_ids=(1,), sampling=SamplingParams(max_tokens=9), lane=0, route=None
)


class Marks:
    """A small language to test with: `<e` begins a thought, `>` ends it; a call of f is in braces."""

    def __init__(self) -> None:
        self.num_held = 0
        self.is_reasoning = False
        self._kind = Kind.CONTENT

    def push(self, text: str) -> list[Piece]:
        pieces = []
        for char in text:
            if self.num_held:
                self.num_held = 0
                if char == "e":
                    self._kind, self.is_reasoning = Kind.REASONING, True
                    continue
                pieces.append(Piece(Kind.CONTENT, "<"))
            if self._kind is not Kind.CONTENT and char in ">}":
                self._kind, self.is_reasoning = Kind.CONTENT, False
            elif self._kind is Kind.CONTENT and char == "<":
                self.num_held = 1
            elif self._kind is Kind.CONTENT and char == "{":
                self._kind = Kind.ARGUMENTS
                pieces.append(Piece(Kind.CALL, "f"))
            else:
                pieces.append(Piece(self._kind, char))
        return pieces

    def flush(self) -> list[Piece]:
        held, self.num_held = self.num_held, 0
        return [Piece(Kind.CONTENT, "<" * held)]


def logprobs(ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, 1, (), ()) for token_id in ids]


def deltas(kind: str, groups: Sequence[Sequence[int]], options: RichOptions, stop: tuple[str, ...]) -> list[Delta]:
    """Return every delta of a stream, written after each group."""
    matcher = StopMatcher(stop) if stop else None
    rich = RichText(options, make_detokenizer(VOCABULARIES[kind]), matcher)
    found = []
    for group in groups:
        is_stopped = rich.push(group, TokenEvent(REQUEST, group, logprobs=logprobs(group)))
        found += rich.take()
        if is_stopped:
            break
    rich.finish()
    return found + rich.take()


@pytest.mark.parametrize("kind", sorted(VOCABULARIES))
@given(data=st.data(), keeps_tokens=st.booleans(), seed=st.integers(0, 10**6))
def test_any_grouping_gives_the_same_message(kind: str, data: st.DataObject, keeps_tokens: bool, seed: int) -> None:
    any_id = st.one_of(st.integers(0, len(VOCABULARIES[kind]) - 1), st.sampled_from([ord(c) % 5 for c in "<>{}e"]))
    if kind == "byte_level":
        any_id |= st.sampled_from([ord(c) for c in "<<>{}ea"])
    ids = data.draw(st.lists(any_id, max_size=30))
    stop = tuple(data.draw(st.lists(st.text("the<a.", min_size=1, max_size=3), max_size=2)))
    options = RichOptions(Marks, make_call_id=lambda: "id", keeps_tokens=keeps_tokens)
    streamed = Message.of(deltas(kind, grouped(ids, seed), options, stop))
    whole = Message.of(deltas(kind, [ids], options, stop))
    assert streamed == whole
    taken = [token.token_id for token in streamed.tokens]
    assert taken == (ids[: len(taken)] if keeps_tokens else [])
    assert len(taken) == len(ids) or stop or not keeps_tokens


@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=30), seed=st.integers(0, 10**6))
def test_tokens_stand_with_the_text_they_end_in(ids: list[int], seed: int) -> None:
    options = RichOptions(keeps_tokens=True)
    for groups in ([[k] for k in ids], grouped(ids, seed)):
        shown, seen = "", []
        for delta in deltas("byte_level", groups, options, ()):
            shown += delta.text
            seen += [token.token_id for token in delta.tokens]
            assert make_detokenizer(BYTE_LEVEL).push(seen).startswith(shown.rstrip("\ufffd"))
        assert seen == ids


def test_a_token_waits_while_its_text_is_held_back() -> None:
    ids = [ord(char) for char in "xSTx"]
    found = deltas("byte_level", [[k] for k in ids], RichOptions(keeps_tokens=True), ("STOP",))
    assert [(d.text, [t.token_id for t in d.tokens]) for d in found] == [("x", ids[:1]), ("STx", ids[1:])]


def test_tokens_without_text_come_last_or_with_the_text_that_follows() -> None:
    ids = [token_id(BYTE_LEVEL, token) for token in ("ðŁ", "ĻĤĠis", "<|end|>")]
    found = deltas("byte_level", [[k] for k in ids], RichOptions(keeps_tokens=True), ())
    assert [(d.text, [t.token_id for t in d.tokens]) for d in found] == [("🙂 is", ids[:2]), ("", ids[2:])]


def test_reasoning_tokens_are_counted_one_by_one() -> None:
    class Think(Marks):
        def __init__(self) -> None:
            super().__init__()
            self._kind, self.is_reasoning = Kind.REASONING, True

    for groups in ([b"abc>d"], [bytes([byte]) for byte in b"abc>d"]):
        rich = RichText(RichOptions(Think), make_detokenizer(BYTE_LEVEL), None)
        for group in groups:
            rich.push(tuple(group), TokenEvent(REQUEST, tuple(group)))
        rich.finish()
        message = Message.of(rich.take())
        assert (message.reasoning, message.content, rich.num_reasoning_tokens) == ("abc", "d", 4)


def test_stop_strings_match_content_only() -> None:
    class Think(Marks):
        def __init__(self) -> None:
            super().__init__()
            self._kind, self.is_reasoning = Kind.REASONING, True

    found = Message.of(deltas("byte_level", [b"stop>so stop it"], RichOptions(Think), ("stop",)))
    assert (found.reasoning, found.content) == ("stop", "so ")


def test_a_call_too_many_ends_the_choice() -> None:
    options = RichOptions(Marks, max_calls=1)
    rich = RichText(options, make_detokenizer(BYTE_LEVEL), None)
    assert not rich.push(tuple(b"{a}"), TokenEvent(REQUEST, tuple(b"{a}")))
    assert rich.push(tuple(b"{b}"), TokenEvent(REQUEST, tuple(b"{b}")))
    rich.finish()
    assert [(c.name, c.arguments) for c in Message.of(rich.take()).calls] == [("f", "a")]
