"""What the engine does with the CPU: milliseconds a decode step, tokens per second, and what scheduling costs.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_engine [--quick] [--model DIR] [--threads N]

Drives a stepper directly, without the front end. Beside it, in the same run: the bare products of the model's weights
at the same batch, which no decode step can be faster than, `transformers.generate` with a static batch, and
transformers' own continuous batching. Then what chunked prefill and the prefix cache are for: the longest gap of
running streams when a long prompt arrives, and the time to the first token after a system prompt that is known.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.load import MODEL, prose
from ftserve.engine.batcher import ContinuousBatcher
from ftserve.engine.blocks import BlockPool
from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.engine.config import EngineConfig
from ftserve.engine.grammar import GrammarCompiler
from ftserve.engine.sampler import Sampler, TokenReading
from ftserve.engine.scheduler import Scheduler, StepPlan
from ftserve.engine.simulated import SimulatedStepper
from ftserve.engine.torch_stepper import TorchStepper, default_threads
from ftserve.engine.types import GenerationRequest, SamplingParams
from ftserve.preprocess.tokens import make_encoder


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode measurement at one batch size."""

    batch: int
    step_ms: float
    tokens_per_s: float


def request(prompt: Sequence[int], max_tokens: int, **options: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)
    return GenerationRequest(request_id="bench", index=0, prompt_ids=prompt, sampling=sampling, lane=0, route=None)


def prompts(checkpoint: Checkpoint, count: int, words: int, seed: int) -> list[array[int]]:
    encode = make_encoder(checkpoint.tokenizer_json, use_fastokens=True)
    return [encode(text, False) for text in prose(random.Random(seed), words, count)]


def decode(
    stepper: ContinuousBatcher[torch.Tensor, TokenReading],
    batch: list[array[int]],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Decode:
    """Prefill a batch, then time the steps in which every sequence gets one token."""
    for prompt in batch:
        stepper.add(request(prompt, steps + 1, **options))
    while len(stepper.step()) < len(batch):  # until all of them decode
        pass
    times = []
    while stepper.num_running():
        began = clock()
        stepper.step()
        times.append(clock() - began)
    step = statistics.median(times)
    return Decode(len(batch), 1e3 * step, len(batch) / step)


def sampling_ms(checkpoint: Checkpoint, stepper: TorchStepper, steps: int) -> dict[str, float]:
    """Return milliseconds of CPU of a step of 32 sequences by what is asked of it, the best of interleaved rounds."""
    name = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
    grammars = GrammarCompiler(
        checkpoint.tokenizer_json, vocab_size=checkpoint.vocab_size, eos_token_ids=checkpoint.eos_token_ids
    )
    kinds: dict[str, dict[str, Any]] = {
        "free": {},
        "a JSON schema": {"grammar": grammars.json_schema({"type": "array", "items": name, "minItems": 200})},
        "a regular expression": {"grammar": grammars.regex("([a-z ]{1,20}, ){200}")},
        "5 logprobs": {"num_logprobs": 5},
    }
    grammars.close()
    batch, found = prompts(checkpoint, 32, 50, 3), dict.fromkeys(kinds, float("inf"))
    for _ in range(3):
        for kind, options in kinds.items():
            found[kind] = min(found[kind], decode(stepper, batch, steps, time.process_time, **options).step_ms)
    return found


def prefill_rate(stepper: TorchStepper, batch: list[array[int]]) -> float:
    """Return prompt tokens per second, one token generated for each prompt."""
    for prompt in batch:
        stepper.add(request(prompt, 1))
    began = time.perf_counter()
    while stepper.num_running() or stepper.num_waiting():
        stepper.step()
    return sum(map(len, batch)) / (time.perf_counter() - began)


def products_ms(checkpoint: Checkpoint, batch: int) -> float:
    """Return milliseconds of one pass over every weight matrix, bfloat16, for `batch` rows."""
    from safetensors.torch import load_file

    files = sorted(checkpoint.path.glob("*.safetensors"))
    weights = [w.bfloat16() for f in files for w in load_file(f).values() if w.dim() == 2]
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], dtype=torch.bfloat16) for w in weights}

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    with torch.inference_mode():
        return 1e3 * median_seconds(run, 7)


def median_seconds(function: Callable[[], object], rounds: int) -> float:
    function()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def transformers_rate(checkpoint: Checkpoint, batch: list[array[int]], new_tokens: int) -> float:
    """Return generated tokens per second of `transformers.generate`, prompts cut to one length, prefill included."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval()
    length = min(map(len, batch))
    ids = torch.tensor([prompt[:length].tolist() for prompt in batch])
    began = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False
    )
    return len(batch) * new_tokens / (time.perf_counter() - began)


def continuous_batching_rate(checkpoint: Checkpoint, batch: list[array[int]], new_tokens: int) -> float:
    """Return generated tokens per second of transformers' continuous batching, prefill included."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval()
    began = time.perf_counter()
    outputs = model.generate_batch(
        [prompt.tolist() for prompt in batch],
        generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=512),
    )
    seconds = time.perf_counter() - began
    return sum(len(output.generated_tokens) for output in outputs.values()) / seconds


def longest_gap_ms(stepper: TorchStepper, running: list[array[int]], long: array[int]) -> float:
    """Return the longest time between two tokens of running streams while a long prompt is taken in."""
    for prompt in running:
        stepper.add(request(prompt, 1000))
    while len(stepper.step()) < len(running):
        pass
    late = request(long, 1)
    stepper.add(late)
    gap, last, is_in = 0.0, time.perf_counter(), False
    while not is_in:
        events = stepper.step()
        now = time.perf_counter()
        if any(event.request is not late for event in events):
            gap, last = max(gap, now - last), now
        is_in = any(event.request is late for event in events)
    stepper.close()
    return 1e3 * gap


def first_token(stepper: TorchStepper, prompt: array[int]) -> tuple[float, int]:
    """Return seconds to the first token of a prompt on an idle engine, and how many of its tokens were cached."""
    stepper.add(request(prompt, 1))
    began = time.perf_counter()
    while not (events := stepper.step()):
        pass
    return time.perf_counter() - began, events[0].num_cached_tokens


class NoModel:
    """A runner that computes nothing: what is left is the engine's own work."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.randn(256, vocab_size)

    def run(self, plan: StepPlan, _unread: TokenReading | None) -> torch.Tensor:
        return self._logits[: len(plan.sampled())].clone()

    def clear(self, blocks: list[int]) -> None:
        """Nothing to clear."""


def own_work_us(batch: int, steps: int) -> float:
    """Return microseconds a decode step of scheduling, sampling (of a small vocabulary) and making events."""
    vocab_size, length = 1000, 4096
    stepper = ContinuousBatcher(
        Scheduler(BlockPool(batch * 40, 16), max_num_seqs=batch, max_prefill_tokens=8192),
        NoModel(vocab_size),
        Sampler(vocab_size, torch.device("cpu")),
        vocab_size=vocab_size,
        max_model_len=length,
        eos_token_ids=frozenset(),
    )
    return 1e3 * decode(stepper, [array("I", range(1, 200))] * batch, steps).step_ms


def idle_share(batch: int, steps: int, *, is_asynchronous: bool) -> float:
    """Return the share of the time in which a simulated H200 has nothing to do, while so many sequences decode."""
    config = EngineConfig(
        kind="simulated", max_num_seqs=batch, max_num_batched_tokens=8192, async_scheduling=is_asynchronous
    )
    stepper = SimulatedStepper(config, range(100), vocab_size=1000, max_model_len=4096)
    for _ in range(batch):
        stepper.add(request(range(1, 150), steps + 8))
    while len(stepper.step()) < batch:
        pass
    busy, began = stepper.device_seconds(), time.perf_counter()
    for _ in range(steps):
        stepper.step()
    return max(0.0, 1.0 - (stepper.device_seconds() - busy) / (time.perf_counter() - began))  # one step is ahead


def print_steps(checkpoint: Checkpoint, stepper: TorchStepper, steps: int) -> None:
    for batch in (1, 8, 32):
        result = decode(stepper, prompts(checkpoint, batch, 150, batch), steps)
        floor = products_ms(checkpoint, batch)
        print(
            f"decode, {batch:3} sequences after 150-word prompts: {result.step_ms:6.1f} ms a step, "
            f"{result.tokens_per_s:6.0f} tok/s; products alone {floor:5.1f} ms, ratio {result.step_ms / floor:.2f}"
        )
    times = sampling_ms(checkpoint, stepper, min(steps, 32))
    shares = [f"{kind} {ms / times['free']:.2f}" for kind, ms in times.items()]
    print(f"CPU time of a step of  32 sequences, as a share of a free one: {', '.join(shares[1:])}")
    print(f"prefill: {prefill_rate(stepper, prompts(checkpoint, 16, 300, 99)):.0f} tok/s")
    for batch in (32, 256):
        print(f"scheduling, sampling and events of {batch:3} sequences: {own_work_us(batch, steps):6.0f} us a step")
    at_once, queued = (idle_share(256, 8 * steps, is_asynchronous=queues) for queues in (False, True))
    print(
        f"a simulated H200 with 256 sequences waits {at_once:.1%} of the time; with its next step queued {queued:.1%}"
    )


def print_peers(checkpoint: Checkpoint, stepper: TorchStepper) -> None:
    batch32 = prompts(checkpoint, 32, 150, 32)
    began, made = time.perf_counter(), 32 * 128
    for prompt in batch32:
        stepper.add(request(prompt, 128))
    while stepper.num_running() or stepper.num_waiting():
        stepper.step()
    print(f"32 x 128 tokens with prefill: {made / (time.perf_counter() - began):.0f} tok/s")
    print(f"the same by transformers.generate: {transformers_rate(checkpoint, batch32, 128):.0f} tok/s")
    rate = continuous_batching_rate(checkpoint, batch32, 128)
    print(f"the same by transformers' continuous batching: {rate:.0f} tok/s")


def print_prompts(checkpoint: Checkpoint, stepper: TorchStepper, config: EngineConfig) -> None:
    (text,) = prompts(checkpoint, 1, 4500, 7)
    running, long = prompts(checkpoint, 16, 150, 16), text[:4000]
    gap = longest_gap_ms(stepper, running, long)
    print(f"longest gap of 16 streams while 4000 tokens arrive, {config.max_num_batched_tokens} a step: {gap:.0f} ms")
    whole = TorchStepper(replace(config, max_num_batched_tokens=4096), checkpoint)
    print(f"the same without chunks: {longest_gap_ms(whole, running, long):.0f} ms")
    system, (one, two) = text[:1000][::-1], prompts(checkpoint, 2, 20, 5)
    (cold_s, _), (warm_s, cached) = first_token(stepper, system + one), first_token(stepper, system + two)
    print(f"first token after a system prompt of 1000 tokens: {1e3 * cold_s:.0f} ms", end="; ")
    print(f"again, {cached} tokens cached: {1e3 * warm_s:.0f} ms, ratio {warm_s / cold_s:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--quick", action="store_true", help="fewer steps, and without the peers and long prompts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = Checkpoint.read(resolve(options.model))
    config = EngineConfig(torch_threads=options.threads)
    stepper = TorchStepper(config, checkpoint)
    print(f"{checkpoint.name}, Python {sys.version.split()[0]}, torch {torch.__version__}, {options.threads} threads\n")
    print_steps(checkpoint, stepper, 16 if options.quick else 128)
    if not options.quick:
        print_peers(checkpoint, stepper)
        print_prompts(checkpoint, stepper, config)


if __name__ == "__main__":
    main()
