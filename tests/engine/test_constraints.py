"""What a sequence may not say: allowed tokens, bad words and grammars, alone and with everything else."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from ftserve.engine.errors import EngineRequestError, InvalidRequestError
from ftserve.engine.grammar import Grammar, GrammarCompiler
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent
from tests.engine.conftest import TINY_CLOSE, TINY_EOS, TINY_TOKENS, VOCAB_SIZE, tiny_text
from tests.engine.schemas import follows, random_schema

pytestmark = pytest.mark.usefixtures("queueing")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tall": {"type": "boolean"}, "age": {"enum": [1, 20]}},
    "required": ["name", "tall", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "tall", "age"} and len(value["name"]) <= 6 and value["age"] in (1, 20)


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(3, 100) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def ids(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def banned_greedy(
    tiny: Any, torch: Any, prompt: list[int], count: int, allowed: tuple[int, ...], bad: tuple[tuple[int, ...], ...]
) -> list[int]:
    """Return greedy output, token by token, each word looked for in the whole output."""
    output: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            logits = tiny.reference(torch.tensor([prompt + output])).logits[0, -1]
        order = logits.argsort(descending=True).tolist()
        output.append(
            next(
                token
                for token in order
                if (not allowed or token in allowed) and not any((*output, token)[-len(word) :] == word for word in bad)
            )
        )
    return output


def test_allowed_tokens_and_bad_words(tiny: Any, torch: Any, make_request: Any, texts: Any) -> None:
    rng = random.Random(1)
    cases: list[tuple[list[int], tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
    for prompt in prompts(6):
        free = tiny.greedy(prompt, 12)
        bad = ((free[0],), tuple(free[1:3]), tuple(free[3:6]), (free[5], free[5]), (200,), (1, 500))
        cases.append((prompt, tuple(rng.sample(range(128), 20)), ()))
        cases.append((prompt, (), bad))
        cases.append((prompt, tuple(free), bad[1:]))
        cases.append((prompt, (), ()))
    requests = [make_request(p, max_tokens=12, allowed_token_ids=a, bad_words=b) for p, a, b in cases]
    expected = [banned_greedy(tiny, torch, p, 12, a, b) for p, a, b in cases]
    assert texts(tiny.batcher(chunk=9), requests) == expected


@pytest.mark.parametrize("vocab_size", [5, 64, 1000])
def test_masks_by_bytes_equal_masks_by_bits(torch: Any, vocab_size: int) -> None:
    from ftserve.engine.constraints import MaskApplier

    rng = np.random.default_rng(0)
    applier = MaskApplier(vocab_size, torch.device("cpu"))
    logits = torch.randn(7, vocab_size)
    allowed = rng.integers(0, 2, (3, -(-vocab_size // 32) * 32)).astype(bool)
    masks = list(np.packbits(allowed, axis=1, bitorder="little"))
    expected = logits.clone()
    expected[[1, 4, 6]] = expected[[1, 4, 6]].masked_fill(torch.from_numpy(~allowed[:, :vocab_size]), float("-inf"))
    applier.apply(logits, [1, 4, 6], masks)
    assert torch.equal(logits, expected)
    again = torch.where(expected.isinf(), 1.0, expected)
    applier._fill(again, [1, 4, 6], [mask[: -(-vocab_size // 8)] for mask in masks])
    assert torch.equal(again, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.5, "seed": 4, "top_k": 5, "top_p": 0.9, "num_logprobs": 3},
        {"ignore_eos": True, "min_tokens": 100},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "logit_bias": ((TINY_EOS, -100.0), (70, 100.0))},
        {"bad_words": ((0x41 - 0x21 + 3,),), "num_prompt_logprobs": 0},
    ],
)
def test_output_follows_the_schema(
    tiny: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler, options: dict[str, Any]
) -> None:
    batcher = tiny.batcher(chunk=7, eos_token_ids=[TINY_EOS])
    grammar = tiny_grammars.json_schema(PERSON)
    guided = [make_request(p, max_tokens=60, index=k % 2, grammar=grammar, **options) for k, p in enumerate(prompts(8))]
    free = [make_request(p, max_tokens=9) for p in prompts(8)]
    for pair in zip(guided, free, strict=True):
        for request in pair:
            batcher.add(request)
    events = drain(batcher)
    for request in guided:
        assert events[request][-1].finish_reason is FinishReason.STOP
        assert is_person(tiny_text(ids(events[request])))
    assert [ids(events[r])[:1] for r in free] == [tiny.greedy(p, 1) for p in prompts(8)]


def test_output_follows_200_random_schemas(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler
) -> None:
    rng = random.Random(11)
    schemas = [random_schema(rng, "e") for _ in range(200)]
    batcher = tiny_llama.batcher(num_blocks=2000, max_num_seqs=64, eos_token_ids=[TINY_EOS])
    requests = [
        make_request([5], max_tokens=190, grammar=tiny_grammars.json_schema(schema), temperature=1.0, seed=k)
        for k, schema in enumerate(schemas)
    ]
    for request in requests:
        batcher.add(request)
    events = drain(batcher)
    for request, schema in zip(requests, schemas, strict=True):
        text = tiny_text(ids(events[request]))
        assert events[request][-1].finish_reason is FinishReason.STOP, (schema, text)
        assert follows(text, schema), (schema, text)


def test_preemption_and_known_prefixes_change_no_structured_output(
    tiny_llama: Any, make_request: Any, texts: Any, tiny_grammars: GrammarCompiler
) -> None:
    grammars = [
        tiny_grammars.json_schema(PERSON),
        tiny_grammars.regex("[a-z]{3,20}, [0-9]+"),
        tiny_grammars.choice(["then", "there", "the other one"]),
        tiny_grammars.json_object(),
    ]
    asked = [(prompt, grammars[k % 4]) for k, prompt in enumerate(prompts(3) * 4)]

    def requests() -> list[GenerationRequest]:
        return [make_request(p, max_tokens=30, grammar=g, temperature=1.0, seed=k) for k, (p, g) in enumerate(asked)]

    alone = [texts(tiny_llama.batcher(eos_token_ids=[TINY_EOS]), [request])[0] for request in requests()]
    batcher = tiny_llama.batcher(num_blocks=24, chunk=11, eos_token_ids=[TINY_EOS])
    assert texts(batcher, requests()) == alone
    assert batcher.statistics().num_preemptions > 0
    assert re.fullmatch("[a-z]{3,20}, [0-9]+", tiny_text(alone[1])) or len(alone[1]) == 30
    assert tiny_text(alone[2]) in ("then", "there", "the other one")


def test_a_grammar_may_begin_later(tiny: Any, make_request: Any, texts: Any, tiny_grammars: GrammarCompiler) -> None:
    prompt = prompts(1)[0]
    free = tiny.greedy(prompt, 40)
    opening = tuple(free[4:6])
    at = next(k for k in range(len(free)) if tuple(free[k : k + 2]) == opening) + 2
    grammar = tiny_grammars.choice(["yes", "no"])
    batcher = tiny.batcher(eos_token_ids=[TINY_EOS])
    begun, never = texts(
        batcher,
        [
            make_request(prompt, max_tokens=20, grammar=grammar, grammar_after=opening),
            make_request(prompt, max_tokens=5, grammar=grammar, grammar_after=(TINY_CLOSE, TINY_CLOSE)),
        ],
    )
    assert begun[:at] == free[:at]
    assert tiny_text(begun[at:]) in ("yes", "no")
    assert never == free[:5]


def test_stop_tokens_end_structured_output_early(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler
) -> None:
    batcher = tiny_llama.batcher(eos_token_ids=[TINY_EOS])
    stop = TINY_TOKENS.index("Ġ")
    request = make_request([5], max_tokens=40, grammar=tiny_grammars.regex("[a-z]{4} end"), stop_token_ids={stop})
    batcher.add(request)
    events = drain(batcher)[request]
    assert re.fullmatch("[a-z]{4} ", tiny_text(ids(events)))
    assert events[-1].stop_token_id == stop


def test_constraints_that_leave_nothing_end_that_request_alone(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler
) -> None:
    batcher = tiny_llama.batcher(eos_token_ids=[TINY_EOS])
    letters = tuple(k for k, token in enumerate(TINY_TOKENS) if token.isalpha())
    stuck = make_request([5], grammar=tiny_grammars.regex("[a-z]{2}[0-9]"), allowed_token_ids=letters)
    free = make_request([5], max_tokens=9)
    batcher.add(stuck)
    batcher.add(free)
    events = drain(batcher)
    assert events[stuck][-1].finish_reason is FinishReason.ERROR
    assert isinstance(events[stuck][-1].error, InvalidRequestError)
    assert re.fullmatch("[a-z]{2}", tiny_text(ids(events[stuck])))
    assert ids(events[free]) == tiny_llama.greedy([5], 9)


class FailingMatcher:
    """A matcher that fails at its third mask: it raises, or says so."""

    def __init__(self, inner: Any, *, raises: bool) -> None:
        self._inner = inner
        self._raises = raises
        self._masks = 0

    def deep_copy(self) -> FailingMatcher:
        return FailingMatcher(self._inner.deep_copy(), raises=self._raises)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def unsafe_compute_mask_ptr(self, *target: int) -> None:
        self._masks += 1
        self._inner.unsafe_compute_mask_ptr(*target)
        if self._raises and self._masks == 3:
            raise ValueError("a secret of the library")

    def is_error(self) -> bool:
        return self._masks >= 3

    def get_error(self) -> str:
        return "a secret of the library"


@pytest.mark.parametrize("raises", [False, True])
def test_a_failing_mask_ends_that_request_alone(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler, raises: bool
) -> None:
    batcher = tiny_llama.batcher(eos_token_ids=[TINY_EOS])
    good = tiny_grammars.json_schema(PERSON)
    bad = Grammar(good.source, VOCAB_SIZE, FailingMatcher(good.matcher, raises=raises))
    asked = [make_request([5, 6], max_tokens=60, grammar=grammar) for grammar in (good, bad, good)]
    for request in asked:
        batcher.add(request)
    events = drain(batcher)
    assert [len(ids(events[asked[1]])), events[asked[1]][-1].finish_reason] == [2, FinishReason.ERROR]
    assert isinstance(events[asked[1]][-1].error, EngineRequestError if raises else InvalidRequestError)
    assert "secret" not in str(events[asked[1]][-1].error)
    for request in (asked[0], asked[2]):
        assert is_person(tiny_text(ids(events[request])))


def test_a_grammar_that_holds_the_batch_up_is_given_up(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler
) -> None:
    """The work for each mask of an ambiguous grammar grows with the text."""
    batcher = tiny_llama.batcher(eos_token_ids=[TINY_EOS], max_model_len=4000, num_blocks=2000)
    ambiguous = tiny_grammars.lark('start: start start | "a" | "b" | "c" | ')
    request = make_request([5], max_tokens=3900, grammar=ambiguous, logit_bias=((TINY_EOS, -100.0),))
    batcher.add(request)
    events = drain(batcher)[request]
    assert isinstance(events[-1].error, InvalidRequestError)
    assert len(ids(events)) > 10


def test_cancelled_while_masks_are_made(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler
) -> None:
    batcher = tiny_llama.batcher(eos_token_ids=[TINY_EOS], max_num_seqs=6)
    rng, grammar = random.Random(2), tiny_grammars.json_object()
    live = [make_request(p, max_tokens=200, grammar=grammar, temperature=1.0) for p in prompts(20, longest=6)]
    for request in live:
        batcher.add(request)
    for _ in range(60):
        ended = {event.request for event in batcher.step() if event.finish_reason is not None}
        live = [request for request in live if request not in ended]
        if live and rng.random() < 0.3:
            batcher.cancel(live.pop(rng.randrange(len(live))))
    drain(batcher)


def test_the_mask_thread_ends_with_the_engine(
    tiny_llama: Any, make_request: Any, drain: Any, tiny_grammars: GrammarCompiler
) -> None:
    batcher = tiny_llama.batcher(eos_token_ids=[TINY_EOS])
    batcher.add(make_request([5], grammar=tiny_grammars.choice(["a"])))
    drain(batcher)
    pool = batcher._sampler._constraints._pool
    batcher.close()
    assert not any(thread.is_alive() for thread in pool._threads)
