"""Decode steps through graphs: all but the capture itself, which needs a CUDA device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ftserve.engine.types import GenerationRequest
from tests.engine.conftest import Tiny


def test_sizes_reach_from_one_to_the_largest() -> None:
    from ftserve.engine.graphs import bucket_sizes

    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert bucket_sizes(200)[-4:] == [112, 128, 160, 192, 200][-4:]


def capture_by_calling(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Be a `Capture` without a device: a replay writes to the memory of the first run, as a graph's does."""
    output = run().clone()

    def replay() -> None:
        output.copy_(run())

    return replay, output


@pytest.fixture
def graphed(tiny_llama: Tiny, kernel: Any, queueing: bool) -> Callable[..., Any]:
    """Make engines whose decode steps go through graphs, and count those that did."""

    def make(**options: Any) -> tuple[Any, list[int]]:
        batcher = tiny_llama.batcher(kernel=kernel, **options)
        batcher._runner.use_graphs(capture_by_calling)
        sizes: list[int] = []
        run = batcher._runner._graphs.run

        def counting(token_ids: Any, *inputs: Any) -> Any:
            sizes.append(len(token_ids))
            return run(token_ids, *inputs)

        batcher._runner._graphs.run = counting
        return batcher, sizes

    return make


def test_tokens_are_those_of_the_plain_model(
    graphed: Callable[..., Any],
    tiny_llama: Tiny,
    make_request: Callable[..., GenerationRequest],
    texts: Callable[..., list[list[int]]],
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(128) for _ in range(rng.randrange(1, 60))] for _ in range(11)]
    batcher, sizes = graphed(max_num_seqs=7, chunk=32)
    requests = [make_request(prompt, rng.randrange(1, 20)) for prompt in prompts]
    for said, request in zip(texts(batcher, requests), requests, strict=True):
        assert said == tiny_llama.greedy(request.prompt_ids, request.sampling.max_tokens)
    assert max(sizes) >= 6
    assert {1, 3} & set(sizes), "batches smaller than their graph"


def test_preempted_sequences_go_on_as_before(
    graphed: Callable[..., Any],
    tiny_llama: Tiny,
    make_request: Callable[..., GenerationRequest],
    texts: Callable[..., list[list[int]]],
) -> None:
    batcher, sizes = graphed(num_blocks=12, max_num_seqs=4)
    requests = [make_request([k + 1] * 6, 20) for k in range(4)]
    for said, request in zip(texts(batcher, requests), requests, strict=True):
        assert said == tiny_llama.greedy(request.prompt_ids, 20)
    assert sizes
    assert batcher.statistics().num_preemptions > 0


def test_a_graph_that_computes_something_else_is_refused(
    torch: Any, tiny_llama: Tiny, kernel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, output = capture_by_calling(run)
        return lambda: (replay(), output.add_(1.0)), output  # type: ignore[return-value]

    def failing(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        raise RuntimeError("operation not permitted when stream is capturing")

    for capture in (wrong, failing):
        batcher = tiny_llama.batcher(kernel=kernel)
        batcher._runner.use_graphs(capture)
        assert batcher._runner._graphs is None
        assert "without CUDA graphs" in caplog.text
        caplog.clear()
