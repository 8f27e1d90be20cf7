"""The whole engine over tiny random models: right tokens, right ends, nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ftserve.engine.errors import EngineRequestError, InvalidRequestError, RequestTooLongError
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent
from tests.engine.conftest import TINY_EOS

pytestmark = pytest.mark.usefixtures("queueing")


def prompts(count: int, *, shortest: int = 1, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Return random prompts of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


@pytest.mark.parametrize("chunk", [*range(1, 18), 64])
def test_greedy_equals_transformers_at_every_chunk_size(tiny: Any, make_request: Any, texts: Any, chunk: int) -> None:
    asked = prompts(6)
    batcher = tiny.batcher(chunk=chunk)
    got = texts(batcher, [make_request(p, max_tokens=12) for p in asked])
    assert got == [tiny.greedy(p, 12) for p in asked]


@pytest.mark.parametrize("chunk", [5, 64])
def test_greedy_equals_transformers_with_our_kernel(
    tiny: Any, make_request: Any, texts: Any, kernel: Any, chunk: int
) -> None:
    asked = prompts(6, longest=80)
    batcher = tiny.batcher(chunk=chunk, kernel=kernel)
    got = texts(batcher, [make_request(p, max_tokens=12) for p in asked])
    assert got == [tiny.greedy(p, 12) for p in asked]


@pytest.mark.parametrize("use_prefix_cache", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_greedy_equals_transformers_under_preemption(
    tiny: Any, make_request: Any, texts: Any, kernel: Any, use_prefix_cache: bool, native: bool
) -> None:
    asked = prompts(8, shortest=8, longest=20)
    batcher = tiny.batcher(
        num_blocks=22, chunk=16, use_prefix_cache=use_prefix_cache, kernel=kernel if native else None
    )
    got = texts(batcher, [make_request(p, max_tokens=30) for p in asked])
    assert batcher.statistics().num_preemptions > 0
    assert (batcher.statistics().blocks.hits > 0) is use_prefix_cache
    assert got == [tiny.greedy(p, 30) for p in asked]


def test_greedy_does_not_depend_on_who_joins_and_leaves(tiny: Any, make_request: Any, drain: Any) -> None:
    asked = prompts(12)
    batcher = tiny.batcher(chunk=16, max_num_seqs=5)
    watched, cancelled = [], []
    got: dict[GenerationRequest, list[TokenEvent]] = {}
    for number, prompt in enumerate(asked):
        request = make_request(prompt, max_tokens=10)
        batcher.add(request)
        watched.append(request)
        if number % 3 == 2:  # someone comes and goes again
            passer_by = make_request(prompts(1, seed=number + 50)[0], max_tokens=50)
            batcher.add(passer_by)
            cancelled.append(passer_by)
        for event in batcher.step():
            got.setdefault(event.request, []).append(event)
        if cancelled and number % 3 == 0:
            batcher.cancel(cancelled.pop())
    for request in cancelled:
        batcher.cancel(request)
    for request, events in drain(batcher).items():
        got.setdefault(request, []).extend(events)
    for request, prompt in zip(watched, asked, strict=True):
        assert [token for event in got[request] for token in event.token_ids] == tiny.greedy(prompt, 10)


@pytest.mark.parametrize("again_after", ["drained", "running"])
def test_a_known_prefix_is_not_computed_again(tiny: Any, make_request: Any, drain: Any, again_after: str) -> None:
    prompt = prompts(1, shortest=30, longest=30)[0]
    batcher = tiny.batcher(block_size=4)
    first = make_request(prompt, max_tokens=20)
    batcher.add(first)
    while not (earlier := batcher.step()):  # computes the prompt
        pass
    if again_after == "drained":
        drain(batcher)
    second = make_request([*prompt[:26], 5, 6, 7, 8, 9], max_tokens=20)
    batcher.add(second)
    events = drain(batcher)
    assert earlier[0].num_cached_tokens == 0
    assert events[second][0].num_cached_tokens == 24
    assert all(event.num_cached_tokens == 0 for event in events[second][1:])
    assert [token for e in events[second] for token in e.token_ids] == tiny.greedy(second.prompt_ids, 20)


def test_the_whole_prompt_known_leaves_one_block_to_compute(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    prompt = prompts(1, shortest=16, longest=16)[0]
    batcher = tiny_llama.batcher(block_size=4)
    for expected in (0, 12):
        request = make_request(prompt, max_tokens=6)
        batcher.add(request)
        events = drain(batcher)[request]
        assert events[0].num_cached_tokens == expected
        assert [token for e in events for token in e.token_ids] == tiny_llama.greedy(prompt, 6)


def test_tenants_share_no_prefix(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    prompt = prompts(1, shortest=16, longest=16)[0]
    batcher = tiny_llama.batcher()
    for salt, expected in ((b"", 0), (b"a", 0), (b"b", 0), (b"a", 12)):
        request = make_request(prompt, cache_salt=salt)
        batcher.add(request)
        assert drain(batcher)[request][0].num_cached_tokens == expected


def test_output_of_an_earlier_turn_is_known(tiny_llama: Any, make_request: Any, drain: Any, texts: Any) -> None:
    prompt = prompts(1, shortest=10, longest=10)[0]
    batcher = tiny_llama.batcher(block_size=4)
    answer = texts(batcher, [make_request(prompt, max_tokens=20)])[0]
    follow_up = make_request([*prompt, *answer, 1, 2, 3])
    batcher.add(follow_up)
    assert drain(batcher)[follow_up][0].num_cached_tokens == 28  # 29 were computed: the last token never is


def test_eos_ends_a_text_and_is_named(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    prompt = prompts(1)[0]
    expected = tiny_llama.greedy(prompt, 12)
    eos = expected[5]
    cut = expected.index(eos) + 1
    batcher = tiny_llama.batcher(eos_token_ids=[eos])
    request = make_request(prompt, max_tokens=12)
    batcher.add(request)
    events = drain(batcher)[request]
    assert [token for e in events for token in e.token_ids] == expected[:cut]
    assert (events[-1].finish_reason, events[-1].stop_token_id) == (FinishReason.STOP, eos)
    assert [e.finish_reason for e in events[:-1]] == [None] * (cut - 1)


def test_ignore_eos_goes_on_but_stop_token_ids_still_end(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    prompt = prompts(1)[0]
    expected = tiny_llama.greedy(prompt, 12)
    batcher = tiny_llama.batcher(eos_token_ids=expected)
    goes_on = make_request(prompt, max_tokens=12, ignore_eos=True)
    stops = make_request(prompt, max_tokens=12, ignore_eos=True, stop_token_ids=frozenset(expected[:1]))
    batcher.add(goes_on)
    batcher.add(stops)
    events = drain(batcher)
    assert [token for e in events[goes_on] for token in e.token_ids] == expected
    assert events[goes_on][-1].finish_reason is FinishReason.LENGTH
    assert events[goes_on][-1].stop_token_id is None
    assert [list(e.token_ids) for e in events[stops]] == [expected[:1]]
    assert events[stops][-1].finish_reason is FinishReason.STOP


def test_min_tokens_keeps_stops_away(tiny_llama: Any, make_request: Any, texts: Any) -> None:
    prompt = prompts(1)[0]
    eos = tiny_llama.greedy(prompt, 1)[0]
    batcher = tiny_llama.batcher(eos_token_ids=[eos])
    short, long = texts(batcher, [make_request(prompt), make_request(prompt, max_tokens=40, min_tokens=7)])
    assert short == [eos]
    assert len(long) > 7
    assert eos not in long[:7]


def test_the_models_length_ends_a_text(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    batcher = tiny_llama.batcher(max_model_len=20)
    request = make_request([1] * 15, max_tokens=100)
    batcher.add(request)
    events = drain(batcher)[request]
    assert len(events) == 5
    assert events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, InvalidRequestError),
        ([1, 128], {}, InvalidRequestError),
        ([-1], {}, InvalidRequestError),
        ([1], {"max_tokens": 0}, InvalidRequestError),
        ([1] * 200, {}, RequestTooLongError),
        ([1] * 60, {"max_tokens": 60}, RequestTooLongError),  # 25 blocks of 4 hold 100
    ],
)
def test_what_can_never_be_served_is_refused(
    tiny_llama: Any, make_request: Any, prompt: list[int], options: dict[str, Any], error: type[Exception]
) -> None:
    batcher = tiny_llama.batcher(num_blocks=25)
    with pytest.raises(error):
        batcher.add(make_request(prompt, **options))
    assert batcher.num_waiting() == 0
    batcher.scheduler.check()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_frees_at_once(tiny_llama: Any, make_request: Any, steps: int) -> None:
    batcher = tiny_llama.batcher(chunk=8)
    request = make_request(prompts(1, shortest=12, longest=12)[0], max_tokens=50)
    batcher.add(request)
    for _ in range(steps):
        batcher.step()
    batcher.cancel(request)
    assert (batcher.num_running(), batcher.num_waiting(), batcher.kv_usage()) == (0, 0, 0.0)
    batcher.scheduler.check()
    assert batcher.step() == []


def test_same_seed_same_text_whatever_else_runs(tiny: Any, make_request: Any, texts: Any) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 20}
    variants: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 20},
        {"min_p": 0.02},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.001},
    ]
    prompt, *others = prompts(9)
    for variant in variants:
        alone = texts(tiny.batcher(), [make_request(prompt, **options, **variant)])[0]
        crowd = [make_request(p, temperature=1.5, max_tokens=15, top_k=3, top_p=0.5) for p in others]
        crowd.insert(4, make_request(prompt, **options, **variant))
        together = texts(tiny.batcher(num_blocks=40, chunk=7), crowd)[4]
        assert together == alone
    assert texts(tiny.batcher(), [make_request(prompt, **options | {"seed": 8})])[0] != alone


def test_choices_of_one_seed_differ(tiny_llama: Any, make_request: Any, texts: Any) -> None:
    requests = [make_request([1, 2, 3], index=i, seed=3, temperature=1.0, max_tokens=20) for i in range(4)]
    assert len({tuple(text) for text in texts(tiny_llama.batcher(), requests)}) == 4


def test_a_request_whose_logits_are_no_numbers_fails_alone(
    tiny_llama: Any, make_request: Any, drain: Any, torch: Any
) -> None:
    embedding = tiny_llama.model.get_input_embeddings().weight
    asked = prompts(4, shortest=5)
    asked = [[token for token in p if token != 99] for p in asked]
    expected = [tiny_llama.greedy(p, 10) for p in asked]
    batcher = tiny_llama.batcher(block_size=4)
    with torch.inference_mode():
        kept = embedding[99].clone()
        embedding[99] = float("nan")
        try:
            bad = make_request([1, 2, 99, 4, 5, 6, 7, 8, 9])
            good = [make_request(p, max_tokens=10) for p in asked]
            for request in (*good[:2], bad, *good[2:]):
                batcher.add(request)
            events = drain(batcher)
            again = [make_request(p, max_tokens=10) for p in asked]  # in the blocks that the bad one left
            for request in again:
                batcher.add(request)
            events |= drain(batcher)
        finally:
            embedding[99] = kept
    assert [e.finish_reason for e in events[bad]] == [FinishReason.ERROR]
    assert isinstance(events[bad][0].error, EngineRequestError)
    for requests in (good, again):
        assert [[token for e in events[r] for token in e.token_ids] for r in requests] == expected
    assert all(bool(torch.isfinite(t).all()) for t in batcher._runner._cache.keys)


def test_stamps_are_in_order(tiny_llama: Any, make_request: Any, drain: Any) -> None:
    batcher = tiny_llama.batcher(chunk=4)
    request = make_request([1] * 10, max_tokens=3)
    batcher.add(request)
    assert request.times.scheduled == 0.0
    batcher.step()
    assert request.times.scheduled > 0.0
    assert request.times.first_token == 0.0
    drain(batcher)
    assert request.times.scheduled <= request.times.first_token <= request.times.finished


def test_smaller_priority_is_served_first(tiny_llama: Any, make_request: Any) -> None:
    batcher = tiny_llama.batcher(max_num_seqs=1)
    late: list[GenerationRequest] = [make_request([1], priority=p, max_tokens=1) for p in (5, 1, 3)]
    for request in late:
        batcher.add(request)
    order = [event.request for _ in range(9) for event in batcher.step()]
    assert order == [late[1], late[2], late[0]]


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: can't allocate memory: you tried", None])
def test_a_prompt_that_runs_out_of_memory_fails_alone(
    tiny_llama: Any, make_request: Any, drain: Any, torch: Any, message: str | None
) -> None:
    batcher = tiny_llama.batcher(chunk=60)
    model, prompts_ = batcher._runner._model, prompts(4, shortest=5, longest=9)

    def fail_if_long(*, input_ids: Any, **options: Any) -> Any:
        if input_ids.shape[1] > 30:
            raise torch.OutOfMemoryError if message is None else RuntimeError(message)
        return model(input_ids=input_ids, **options)

    batcher._runner._model = fail_if_long
    good = [make_request(p, max_tokens=9) for p in prompts_]
    long = make_request([1] * 45)
    for request in (*good[:2], long, *good[2:]):
        batcher.add(request)
    events = drain(batcher)
    assert [(e.finish_reason, type(e.error)) for e in events[long]] == [(FinishReason.ERROR, EngineRequestError)]
    for request, prompt in zip(good, prompts_, strict=True):
        assert [token for e in events[request] for token in e.token_ids] == tiny_llama.greedy(prompt, 9)


def test_any_other_failure_of_the_device_is_raised(tiny_llama: Any, make_request: Any) -> None:
    batcher = tiny_llama.batcher()

    def fail(*_: Any) -> Any:
        raise RuntimeError("illegal memory access")

    batcher._runner.run = fail
    batcher.add(make_request([1]))
    with pytest.raises(RuntimeError, match="illegal"):
        batcher.step()


def test_500_random_requests_say_what_each_says_alone(
    tiny_llama: Any, make_request: Any, texts: Any, kernel: Any, tiny_grammars: Any
) -> None:
    rng = random.Random(5)
    heads = prompts(4, shortest=30, longest=30, seed=9)
    batcher = tiny_llama.batcher(num_blocks=45, chunk=20, max_num_seqs=12, kernel=kernel, eos_token_ids=[TINY_EOS])
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammars = [tiny_grammars.json_schema(number), tiny_grammars.regex("[a-z ]{2,12}[.]"), *[None] * 6]
    live: dict[GenerationRequest, list[int]] = {}
    done: dict[GenerationRequest, list[int]] = {}
    to_come = [
        make_request(
            rng.choice(heads)[: rng.randint(1, 30)] + [rng.randrange(128) for _ in range(rng.randint(0, 12))],
            max_tokens=rng.randint(1, 24),
            index=rng.randint(0, 2),
            priority=rng.randint(0, 1),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 10]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            min_tokens=rng.choice([0, 3]),
            stop_token_ids=frozenset(rng.sample(range(128), rng.choice([0, 5]))),
            seed=rng.randrange(1000),
            grammar=rng.choice(grammars),
            bad_words=tuple(tuple(rng.sample(range(128), rng.randint(1, 2))) for _ in range(rng.choice([0, 0, 30]))),
            num_logprobs=rng.choice([None, None, 0, 3]),
            num_prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        for _ in range(500)
    ]
    asked = list(to_come)
    while to_come or live:
        for _ in range(min(len(to_come), rng.randint(0, 3))):
            request = to_come.pop()
            batcher.add(request)
            live[request] = []
        if live and rng.random() < 0.1:
            leaves = rng.choice(list(live))
            batcher.cancel(leaves)
            del live[leaves]
        for event in batcher.step():
            live[event.request] += event.token_ids
            if event.request.sampling.num_logprobs is not None:
                assert [score.token_id for score in event.logprobs or ()] == list(event.token_ids)
            if event.finish_reason is not None:
                done[event.request] = live.pop(event.request)
    batcher.scheduler.check()
    assert batcher.statistics().num_preemptions > 0
    assert len(done) > 300
    for request in asked:
        if request in done:
            alone = tiny_llama.batcher(kernel=kernel, eos_token_ids=[TINY_EOS])
            assert texts(alone, [request])[0] == done[request]
