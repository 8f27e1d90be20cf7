from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ftserve.engine.sequence import Sequence
from ftserve.engine.types import GenerationRequest, SamplingParams

# Upper quantiles of the chi-square distribution at 1e-6, by degrees of freedom: a right sampler fails one run in a
# million, and runs are seeded.
CHI_SQUARE = {2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 7: 40.5, 9: 44.8, 11: 49.0}


@pytest.fixture
def sampler(torch: Any) -> Any:
    from ftserve.engine.sampler import Sampler

    return Sampler(10, torch.device("cpu"))


@pytest.fixture
def make_sequence() -> Any:
    made = 0

    def make(prompt_ids: Any = (1,), output: Any = (), *, index: int = 0, eos: Any = (), **sampling: Any) -> Sequence:
        nonlocal made
        made += 1
        request = GenerationRequest(
            request_id=str(made),
            index=index,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(**({"max_tokens": 100000, "temperature": 1.0, "seed": made} | sampling)),
            lane=0,
            route=None,
        )
        sequence = Sequence(request, arrival=made, eos_ids=eos, max_model_len=200000)
        sequence.token_ids += output
        return sequence

    return make


def choose(sampler: Any, logits: Any, sequences: list[Sequence]) -> list[int | None]:
    """Return the token that each sequence gets."""
    tokens: list[int | None] = sampler.sample(logits, sequences).read().tokens
    return tokens


LOGITS = [0.31, -1.03, 2.07, 0.29, 1.53, -3.01, 0.02, 0.93, -0.51, 1.21]  # no two equal, nor by a few penalties


def expected_distribution(torch: Any, logits: list[float], params: SamplingParams) -> Any:
    """Return the probabilities by the formulas, one after the other, without any cleverness."""
    probabilities = torch.softmax(torch.tensor(logits, dtype=torch.float64) / params.temperature, -1)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    order = sorted(range(len(logits)), key=lambda i: -probabilities[i])
    if params.top_k:
        kth = probabilities[order[params.top_k - 1]]
        probabilities[probabilities < kth] = 0
        probabilities /= probabilities.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p:
            probabilities[token] = 0
        before += float(probabilities[token])
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.7},
        {"min_p": 0.1, "top_p": 0.9, "temperature": 1.5},
        {"min_p": 0.05, "top_k": 7, "top_p": 0.95, "temperature": 1.3},
    ],
)
def test_draws_follow_the_formulas(torch: Any, sampler: Any, make_sequence: Any, options: dict[str, Any]) -> None:
    count = 4000
    sequences = [make_sequence(**options) for _ in range(count)]
    probabilities = expected_distribution(torch, LOGITS, sequences[0].request.sampling)
    drawn = Counter(choose(sampler, torch.tensor([LOGITS] * count), sequences))
    possible = [token for token in range(10) if probabilities[token] > 0]
    assert set(drawn) <= set(possible)
    statistic = sum(
        (drawn[token] - count * float(probabilities[token])) ** 2 / (count * float(probabilities[token]))
        for token in possible
    )
    assert statistic < CHI_SQUARE.get(len(possible) - 1, 45.0)


def test_draws_of_one_sequence_are_independent(torch: Any, sampler: Any, make_sequence: Any) -> None:
    sequence = make_sequence()
    pairs: Counter[tuple[Any, Any]] = Counter()
    previous = None
    for _ in range(4000):
        token = choose(sampler, torch.tensor([[0.0, 0.0]]), [sequence])[0]
        sequence.append(token)
        pairs[previous, token] += 1
        previous = token
    expected = 3999 / 4
    assert sum((pairs[a, b] - expected) ** 2 / expected for a in (0, 1) for b in (0, 1)) < CHI_SQUARE[3]


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 65, 1000, 5000])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.999}, {"top_k": 40}, {"top_k": 70, "top_p": 0.5}, {"top_k": 10**6}, {}]
)
def test_any_size_of_vocabulary_and_of_its_head(
    torch: Any, make_sequence: Any, vocab_size: int, options: dict[str, Any]
) -> None:
    from ftserve.engine.sampler import Sampler

    sampler = Sampler(vocab_size, torch.device("cpu"))
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)) * 0.1
    largest = logits.argsort(descending=True, dim=-1)
    sequences = [make_sequence(**options) for _ in range(5)]
    for row, token in enumerate(choose(sampler, logits, sequences)):
        assert token is not None
        assert 0 <= token < vocab_size
        if options.get("top_k"):
            assert token in largest[row, : options["top_k"]].tolist()


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 5000])
def test_a_device_keeps_the_same_tokens_without_asking_the_host(
    torch: Any, make_sequence: Any, vocab_size: int
) -> None:
    """Where the largest weights are not looked at one after the other, the threshold is found by bisection."""
    from ftserve.engine.sampler import Draws

    options = [{"top_k": k, "top_p": p} for k in (0, 1, 5, 70, 10**6) for p in (1e-6, 0.05, 0.5, 0.9, 0.999, 1.0)]
    draws = Draws.of([make_sequence(**each) for each in options], torch.device("cpu"))
    assert draws is not None
    spread = torch.logspace(-1, 1, len(options))[:, None]
    logits = torch.randn(len(options), vocab_size, generator=torch.Generator().manual_seed(2)) * spread
    weights = torch.softmax(logits, dim=-1)
    by_bisection, by_search = (
        weights >= found(weights) for found in (draws._bisect_threshold, draws._search_threshold)
    )
    assert (by_bisection == by_search).all()


def test_rows_are_independent_of_their_neighbours(torch: Any, sampler: Any, make_sequence: Any) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"logit_bias": ((5, 9.0),)},
    ]
    logits = torch.randn(60, 10, generator=torch.Generator().manual_seed(1))
    options = [variants[i % len(variants)] | {"seed": i} for i in range(60)]
    together = choose(sampler, logits.clone(), [make_sequence(**o) for o in options])
    alone = [choose(sampler, logits[i : i + 1].clone(), [make_sequence(**o)])[0] for i, o in enumerate(options)]
    assert together == alone


def test_equal_logits_pass_a_filter_together(torch: Any, make_sequence: Any) -> None:
    from ftserve.engine.sampler import Sampler

    sampler = Sampler(200, torch.device("cpu"))
    logits = torch.zeros(3000, 200)
    drawn = set(choose(sampler, logits, [make_sequence(top_k=5) for _ in range(3000)]))
    assert len(drawn) == 200


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("broken", [[float("nan")] * 10, [0.0] * 9 + [float("nan")], [float("-inf")] * 10])
def test_rows_that_are_no_numbers_give_none_and_leave_others_alone(
    torch: Any, sampler: Any, make_sequence: Any, options: dict[str, Any], broken: list[float]
) -> None:
    good, bad, also_good = (make_sequence(**options) for _ in range(3))
    tokens = choose(sampler, torch.tensor([LOGITS, broken, LOGITS]), [good, bad, also_good])
    assert tokens[1] is None
    assert None not in (tokens[0], tokens[2])


def test_a_tiny_temperature_is_greedy(torch: Any, sampler: Any, make_sequence: Any) -> None:
    sequences = [make_sequence(temperature=1e-9) for _ in range(50)]
    assert set(choose(sampler, torch.tensor([LOGITS] * 50), sequences)) == {2}


def test_uniform_is_spread_over_its_range() -> None:
    from ftserve.engine.sampler import uniform

    bins = Counter(int(uniform(seed, 0, index) * 10) for seed in range(100) for index in range(100))
    assert sum((bins[k] - 1000) ** 2 / 1000 for k in range(10)) < CHI_SQUARE[9]
    assert all(0.0 <= uniform(s, 1, 2) < 1.0 for s in (-1, 0, 2**64 - 1, 2**70))


def test_bias_and_min_tokens(torch: Any, sampler: Any, make_sequence: Any) -> None:
    biased = make_sequence(temperature=0.0, logit_bias=((5, 100.0), (2, -100.0)))
    early = make_sequence(temperature=0.0, min_tokens=2, eos=[2, 4], stop_token_ids=frozenset({99999}))  # no such id
    sequences = [biased, early]
    tokens = [choose(sampler, torch.tensor([LOGITS, LOGITS]), sequences)]
    for _ in range(2):
        early.append(0)
        tokens.append(choose(sampler, torch.tensor([LOGITS, LOGITS]), sequences))
    assert tokens == [[5, 9], [5, 9], [5, 2]]


def penalized(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> list[float]:
    """Return what the penalties make of `logits`, token by token."""
    result = []
    for token, logit in enumerate(logits):
        factor = p.repetition_penalty if token in prompt or token in output else 1.0
        repeated = logit / factor if logit > 0 else logit * factor
        said = output.count(token)
        result.append(repeated - said * p.frequency_penalty - (said > 0) * p.presence_penalty)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3},
    ],
)
def test_penalties_follow_the_formulas_as_texts_grow(
    torch: Any, sampler: Any, make_sequence: Any, options: dict[str, Any]
) -> None:
    live = [
        make_sequence([2, 1], [4], temperature=0.0, **options),
        make_sequence([5], [], temperature=0.0),
        make_sequence([3], [2, 2, 7], temperature=0.0, **options),
    ]
    late = make_sequence([9, 9], [9, 2], temperature=0.0, **options)  # joins, as if it came back after a preemption
    for round_ in range(12):
        if round_ == 4:
            live.insert(1, late)
        if round_ == 8:
            live.pop(0)
        tokens = choose(sampler, torch.tensor([LOGITS] * len(live)), live)
        for sequence, token in zip(live, tokens, strict=True):
            output = sequence.token_ids[sequence.prompt_len :]
            prompt = sequence.token_ids[: sequence.prompt_len]
            wanted = penalized(LOGITS, prompt, output, sequence.request.sampling)
            assert token == max(range(10), key=lambda t: wanted[t])
            sequence.append(token)
