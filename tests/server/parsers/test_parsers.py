"""Every parser finds the same in its input however that is cut, and survives what models get wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftserve.server.parsers.registry import TOOL_PARSERS
from ftserve.server.rich import Kind, OutputParser
from tests.server.parsers.samples import SAMPLES, SCHEMAS, Sample

Found = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls


def parse(parser: OutputParser, parts: Sequence[str]) -> Found:
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    num_given = 0
    for k in range(len(parts) + 1):
        pieces = parser.push(parts[k]) if k < len(parts) else parser.flush()
        for kind, text in pieces:
            if kind is Kind.CONTENT:
                content += text
            elif kind is Kind.REASONING:
                reasoning += text
            elif kind is Kind.CALL:
                calls.append((text, ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
        num_given += k < len(parts) and len(parts[k])
        assert 0 <= parser.num_held <= num_given
    return content, reasoning, calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


def every_cut(text: str, seed: int = 0) -> Iterator[list[str]]:
    """Yield the text cut at each place, into characters, and at two and three places at random."""
    yield list(text)
    for place in range(len(text)):
        yield cut(text, [place])
    rng = random.Random(seed)
    for k in range(60):
        yield cut(text, rng.choices(range(len(text)), k=2 + k % 2))


def make(name: str) -> OutputParser:
    return TOOL_PARSERS[name].prepare(SCHEMAS)()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.parser}-{SAMPLES.index(sample)}")
def test_calls_are_found_however_the_text_is_cut(sample: Sample) -> None:  # case 11
    whole = parse(make(sample.parser), [sample.text])
    content, reasoning, calls = whole
    assert [(name, json.loads(arguments)) for name, arguments in calls] == sample.calls
    assert (content, reasoning) == (sample.content, sample.reasoning)
    for parts in every_cut(sample.text):
        assert parse(make(sample.parser), parts) == whole


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.parser}-{SAMPLES.index(sample)}")
def test_a_truncated_output_is_the_beginning_of_the_whole(sample: Sample) -> None:
    _content, reasoning, calls = parse(make(sample.parser), [sample.text])
    for end in range(0, len(sample.text), 2):
        text = sample.text[:end]
        found = parse(make(sample.parser), [text])
        assert found == parse(make(sample.parser), list(text))
        assert len(found[2]) <= len(calls)
        assert all(a[0] == b[0] for a, b in zip(found[2], calls, strict=False))
        assert reasoning.startswith(found[1]) or found[1] in text


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_plain_text_stays_as_it_is(name: str) -> None:
    for text in ("Hello, world!", "  indented\n\n", "a [b] <c> {d} (e)", "\n", "x" * 3000):
        for parts in ([text], list(text)):
            assert parse(make(name), parts) == (text, "", []) or (name == "harmony" and not text.strip())


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_malformed_output_neither_raises_nor_depends_on_its_cuts(name: str, data: st.DataObject, seed: int) -> None:
    own = [sample.text for sample in SAMPLES if sample.parser == name]
    pieces = data.draw(st.lists(st.tuples(st.sampled_from(own), st.integers(0, 80), st.integers(0, 30)), max_size=6))
    text = "".join(sample[at : at + length] for sample, at, length in pieces)
    whole = parse(make(name), [text])
    assert parse(make(name), list(text)) == whole
    if text:
        rng = random.Random(seed)
        assert parse(make(name), cut(text, rng.choices(range(len(text)), k=4))) == whole


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@given(data=st.data())
def test_no_letter_is_lost(name: str, data: st.DataObject) -> None:
    """Letters that no marker has come out again, wherever they stand."""
    own = [sample.text for sample in SAMPLES if sample.parser == name]
    text = data.draw(st.sampled_from(own))
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, len(text)))
    content, reasoning, calls = parse(make(name), [text[:at] + "ZQZ" + text[at:end]])
    shown = content + reasoning + "".join(name + arguments for name, arguments in calls)
    assert "ZQZ" in shown or "ZQ" in shown or not is_shown_place(name, text, at)


def is_shown_place(name: str, text: str, at: int) -> bool:
    """Whether what stands there is text, not the layout of a call or a header."""
    return at == 0 and name != "harmony"
