"""How the model speaks is told from its template, and what it thinks from the end of the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken

from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.preprocess.text import make_detokenizer
from ftserve.preprocess.vocabulary import TokenKind, Vocabulary, build_vocabulary
from ftserve.server.config import DEFAULT_MODEL
from ftserve.server.dialect import Dialect
from ftserve.server.rich import Kind
from ftserve.server.tools import CallPlan
from tests.preprocess.test_text import BYTE_LEVEL, byte_fallback_tokenizer, byte_level_tokenizer, opaque_tokenizer

QWEN3 = "{{ '<tool_call>' }}{{ '<think>' }}{{ '</think>' }}"
ONLY_STRIPS = "{{ messages[0].content.split('</think>')[-1] }}"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.read(resolve(DEFAULT_MODEL))


def dialect(checkpoint: Checkpoint, template: str, thoughts: str = "auto") -> Dialect:
    return Dialect.of(replace(checkpoint, chat_template=template), BYTE_LEVEL, "auto", thoughts)


def test_a_template_tells_both(checkpoint: Checkpoint) -> None:
    found = dialect(checkpoint, QWEN3)
    assert (found.tool_parser, found.thought_parser, found.may_think) == ("hermes", "think", True)
    assert dialect(checkpoint, QWEN3, "none").thoughts is None
    plain = dialect(checkpoint, "{{ messages }}")
    assert (plain.tool_parser, plain.thought_parser) == ("hermes", "none")
    assert plain.parser("", None) is None
    assert dialect(checkpoint, "<|channel|>").is_harmony


@pytest.mark.parametrize(
    ("template", "thoughts", "prompt", "is_open", "thought_end"),
    [
        (QWEN3, "auto", "assistant\n", False, "</think>"),
        (QWEN3, "auto", "assistant\n<think>\n", True, "</think>"),
        (QWEN3, "auto", "assistant\n<think>\n\n</think>\n\n", False, ""),
        (ONLY_STRIPS, "auto", "assistant\n", False, ""),
        (ONLY_STRIPS, "deepseek_r1", "assistant\n", True, "</think>"),
        (ONLY_STRIPS, "deepseek_r1", "<think></think>", False, ""),
        ("<|channel|>", "auto", "<|start|>assistant", False, "<|channel|>final<|message|>"),
    ],
)
def test_the_prompt_tells_whether_a_thought_is_open(
    checkpoint: Checkpoint, template: str, thoughts: str, prompt: str, is_open: bool, thought_end: str
) -> None:
    found = dialect(checkpoint, template, thoughts)
    make_parser = found.parser(prompt, None)
    assert make_parser is not None
    assert make_parser().is_reasoning == is_open
    assert found.thought_end(prompt) == thought_end


def test_a_forced_call_follows_the_thought(checkpoint: Checkpoint) -> None:
    plan = CallPlan([], {"f": {}}, is_forced=True, forced_name="f")
    make_parser = dialect(checkpoint, QWEN3).parser("<think>", plan)
    assert make_parser is not None
    parser = make_parser()
    pieces = parser.push("Hm</think>{}") + parser.flush()
    assert pieces == [(Kind.REASONING, "Hm"), (Kind.CALL, "f"), (Kind.ARGUMENTS, "{}")]


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer, opaque_tokenizer])
def test_markers_are_text_and_other_special_tokens_are_not(make: object) -> None:
    assert callable(make)
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<mark>", special=True), AddedToken("<other>", special=True)])
    usual = build_vocabulary(tokenizer)
    shown = usual.showing(("<mark>", "<absent>"))

    def text(vocabulary: Vocabulary) -> str:
        detokenizer = make_detokenizer(vocabulary)
        ids = [tokenizer.token_to_id(token) for token in ("<mark>", "<other>", "<mark>")]
        return "".join([detokenizer.push([k]) for k in ids]) + detokenizer.flush()

    assert text(usual) == ""
    assert text(shown).split("<mark>") == ["", " " if usual.kind is TokenKind.OPAQUE else "", ""]
    assert usual.showing(("<absent>",)) is usual
