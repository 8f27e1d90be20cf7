"""Thoughts are told from what follows, however the text is cut."""

from __future__ import annotations

import pytest

from ftserve.server.parsers.registry import TOOL_PARSERS
from ftserve.server.parsers.think import ThinkParser
from tests.server.parsers.test_parsers import every_cut, parse

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def make(*, is_open: bool, with_calls: bool = False) -> ThinkParser:
    then = TOOL_PARSERS["hermes"].prepare({})() if with_calls else None
    return ThinkParser("<think>", "</think>", is_open=is_open, then=then)


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm\n\nno.\n</think>\n\nYes.\n", "Hm\n\nno.", "Yes.\n"),
        (True, "Hm.</think>Yes.", "Hm.", "Yes."),
        (True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (False, "<thin", "", "<thin"),
        (False, "\n <b>", "", "\n <b>"),
        (True, "Never ends </thin", "Never ends </thin", ""),
        (True, "Ends.</think>", "Ends.", ""),
        (False, "<think>a < b </thinking></think>c", "a < b </thinking>", "c"),
        (True, "", "", ""),
    ],
)
def test_a_thought_ends_at_its_marker(is_open: bool, text: str, reasoning: str, content: str) -> None:
    for parts in ([text], *every_cut(text)) if text else ([],):
        assert parse(make(is_open=is_open), parts) == (content, reasoning, [])


def test_a_call_behind_a_thought_is_found_and_one_inside_is_not() -> None:
    text = f"<think>{CALL}</think>\n{CALL}"
    for parts in ([text], *every_cut(text)):
        assert parse(make(is_open=False, with_calls=True), parts) == ("", CALL, [("f", "{}")])
