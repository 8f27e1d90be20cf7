"""Log-probabilities of chosen tokens and of prompts, against float32 log-softmax of transformers' own logits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ftserve.engine.types import TokenEvent, TokenLogprobs


def reference(tiny: Any, torch: Any, token_ids: list[int]) -> Any:
    """Return float32 log-probabilities of what follows each token [T, vocabulary], by transformers alone."""
    with torch.inference_mode():
        return tiny.reference(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def check(torch: Any, got: TokenLogprobs, expected: Any, token_id: int, count: int) -> None:
    """Compare one token's numbers with the row of log-probabilities that it was chosen from."""
    assert got.token_id == token_id
    assert got.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
    assert got.rank == 1 + int((expected > expected[token_id]).sum())
    values, ids = expected.topk(count)
    assert list(got.top_ids) == ids.tolist()
    assert list(got.top_logprobs) == pytest.approx(values.tolist(), abs=1e-4)


def check_output(tiny: Any, torch: Any, prompt: list[int], events: list[TokenEvent], count: int) -> None:
    output = [token for event in events for token in event.token_ids]
    expected = reference(tiny, torch, prompt + output)
    scores = [score for event in events for score in event.logprobs or ()]
    assert len(scores) == len(output)
    for at, (token_id, score) in enumerate(zip(output, scores, strict=True)):
        check(torch, score, expected[len(prompt) - 1 + at], token_id, count)


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(128) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4, "top_k": 5, "presence_penalty": 1.5}])
def test_logprobs_are_those_of_the_models_own_logits(
    tiny: Any, make_request: Any, drain: Any, torch: Any, options: dict[str, Any]
) -> None:
    batcher = tiny.batcher()
    asked = {
        make_request(p, num_logprobs=k, **options): (p, k) for p, k in zip(prompts(5), (0, 1, 3, 5, 20), strict=True)
    }
    plain = make_request(prompts(1)[0], **options)
    for request in (*asked, plain):
        batcher.add(request)
    events = drain(batcher)
    for request, (prompt, count) in asked.items():
        check_output(tiny, torch, prompt, events[request], count)
    assert all(event.logprobs is None and event.prompt_logprobs is None for event in events[plain])


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("count", [0, 4])
def test_a_prompt_is_scored_whole_whatever_its_chunks(
    tiny: Any, make_request: Any, drain: Any, torch: Any, chunk: int, count: int
) -> None:
    batcher = tiny.batcher(chunk=chunk)
    asked = [make_request(p, num_prompt_logprobs=count, max_tokens=3) for p in [[5], *prompts(4)]]
    for request in (*asked, make_request([1] * 9)):
        batcher.add(request)
    events = drain(batcher)
    for request in asked:
        prompt = list(request.prompt_ids)
        first, *later = events[request]
        assert all(event.prompt_logprobs is None for event in later)
        expected = reference(tiny, torch, prompt)
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(prompt)
        for at, score in enumerate(first.prompt_logprobs[1:]):
            assert score is not None
            check(torch, score, expected[at], prompt[at + 1], count)


def test_a_known_prefix_does_not_cut_a_prompts_scores_short(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    batcher = tiny_llama.batcher()
    prompt = prompts(1, longest=40)[0] * 4
    scores = []
    for _ in range(2):
        request = make_request(prompt, num_prompt_logprobs=2)
        batcher.add(request)
        first = drain(batcher)[request][0]
        assert first.num_cached_tokens == 0
        scores.append(first.prompt_logprobs)
    assert scores[0] == scores[1]
    plain = make_request(prompt)
    batcher.add(plain)
    assert drain(batcher)[plain][0].num_cached_tokens > 0


def test_scores_survive_a_preemption(tiny_llama: Any, make_request: Any, drain: Any, torch: Any) -> None:
    batcher = tiny_llama.batcher(num_blocks=26, chunk=5)
    asked = [make_request(p, num_prompt_logprobs=1, num_logprobs=2, max_tokens=30) for p in prompts(6, longest=25)]
    for request in asked:
        batcher.add(request)
    events = drain(batcher)
    assert batcher.statistics().num_preemptions > 0
    for request in asked:
        prompt = list(request.prompt_ids)
        check_output(tiny_llama, torch, prompt, events[request], 2)
        scores = events[request][0].prompt_logprobs or ()
        assert [score.token_id for score in scores if score] == prompt[1:]
        assert sum(event.prompt_logprobs is not None for event in events[request]) == 1
