"""An engine whose device only keeps time: a GPU's pace without a GPU, to see what a front end can feed.

Scheduler, block pool and prefix cache are the real ones. A step takes as long as a roofline says:

    step = overhead + sequences * overhead per sequence
         + max(weights / bandwidth, tokens * FLOPs per token / compute)     matrix products
         + (attention FLOPs of prompt tokens + FLOPs of the vision tower) / compute
         + keys and values of decoding sequences / bandwidth

Bandwidth, compute and memory are those of NVIDIA's data sheets (dense; FP8 on H100 and H200, FP16 on A100). The four
numbers a profile fits (the reached shares of compute and bandwidth, the two overheads) are fitted to the throughputs
that NVIDIA published for Llama 3.1 in TensorRT-LLM's performance overview, release 0.17, nine pairs of input and output
length each; `tests/engine/test_simulated.py` holds that table and the remaining error (1 to 6 % RMS).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from ftserve.engine.batcher import ContinuousBatcher, Sampled
from ftserve.engine.blocks import BLOCK_SIZE, BlockPool
from ftserve.engine.config import EngineConfig
from ftserve.engine.media import UncheckedMedia
from ftserve.engine.null import scripted_logprobs
from ftserve.engine.scheduler import Scheduler, ScoredChunk, StepPlan
from ftserve.engine.sequence import Sequence

_USABLE_MEMORY = 0.9  # of the device; the rest is left to others, as engines do by default
_WORKSPACE_BYTES = 4e9  # of activations and libraries, on each device
# Qwen2.5-VL's vision tower: four patches a token through 0.67 B parameters; its windowed attention is left out.
_VISION_FLOPS_PER_TOKEN = 4 * 2 * 0.67e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, from its data sheet."""

    flops: float  # dense, at `weight_bytes`
    bandwidth: float  # bytes per second
    memory: float  # bytes
    weight_bytes: int  # of one parameter, and of one element of the KV cache


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a language model that its time depends on."""

    params: float
    layers: int
    hidden_size: int
    kv_width: int  # elements of one key, over all KV heads of a layer


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on."""

    prefill_tokens: int = 0
    prefill_context: int = 0  # sum over prompt tokens of the tokens that each attends to
    decodes: int = 0  # sequences that get one token
    decode_context: int = 0  # sum of their lengths
    sampled: int = 0  # sequences that get a token, by decoding or at the end of their prompt
    media_tokens: int = 0  # of the prompt tokens, those that stand for images and videos

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        tokens = context = media = 0
        for sequence, count in plan.prefills:
            tokens += count
            start = sequence.num_computed
            context += count * (2 * start + count) // 2
            for span in sequence.request.media:
                media += max(0, min(start + count, span.offset + span.num_tokens) - max(start, span.offset))
        decode_context = sum(sequence.num_computed for sequence in plan.decodes)
        return cls(tokens, context, len(plan.decodes), decode_context, len(plan.sampled()), media)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A model on devices that work as one (tensor parallel)."""

    gpu: Gpu
    decoder: Decoder
    num_gpus: int
    compute_share: float  # fitted, as the three below
    bandwidth_share: float
    step_s: float
    sequence_s: float

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.decoder.layers * self.decoder.kv_width * self.gpu.weight_bytes

    @property
    def kv_capacity_tokens(self) -> int:
        weights = self.decoder.params * self.gpu.weight_bytes
        room = self.num_gpus * (_USABLE_MEMORY * self.gpu.memory - _WORKSPACE_BYTES) - weights
        return int(room / self.kv_bytes_per_token)

    def step_seconds(self, shape: StepShape) -> float:
        decoder, gpu = self.decoder, self.gpu
        flops = gpu.flops * self.num_gpus * self.compute_share
        bandwidth = gpu.bandwidth * self.num_gpus * self.bandwidth_share
        tokens = shape.prefill_tokens + shape.decodes
        attention_flops = 4 * decoder.layers * decoder.hidden_size * shape.prefill_context
        extra_flops = attention_flops + _VISION_FLOPS_PER_TOKEN * shape.media_tokens
        return (
            self.step_s
            + self.sequence_s * shape.sampled
            + max(decoder.params * gpu.weight_bytes / bandwidth, tokens * 2 * decoder.params / flops)
            + extra_flops / flops
            + self.kv_bytes_per_token * shape.decode_context / bandwidth
        )


_A100 = Gpu(flops=312e12, bandwidth=2.039e12, memory=80e9, weight_bytes=2)
_H100 = Gpu(flops=1979e12, bandwidth=3.35e12, memory=80e9, weight_bytes=1)
_H200 = Gpu(flops=1979e12, bandwidth=4.8e12, memory=141e9, weight_bytes=1)
_LLAMA_8B = Decoder(params=8.03e9, layers=32, hidden_size=4096, kv_width=1024)
_LLAMA_70B = Decoder(params=70.6e9, layers=80, hidden_size=8192, kv_width=1024)

PROFILES: dict[str, DeviceProfile] = {
    "a100-8b": DeviceProfile(_A100, _LLAMA_8B, 1, 0.871, 0.693, 0.002, 9.0e-6),
    "h100-8b": DeviceProfile(_H100, _LLAMA_8B, 1, 0.658, 0.841, 0.002, 4.6e-6),
    "h200-8b": DeviceProfile(_H200, _LLAMA_8B, 1, 0.642, 0.827, 0.002, 5.1e-6),
    "a100-70b": DeviceProfile(_A100, _LLAMA_70B, 4, 0.656, 0.388, 0.005, 9.9e-6),
    "h100-70b": DeviceProfile(_H100, _LLAMA_70B, 4, 0.474, 0.420, 0.005, 8.9e-6),
    "h200-70b": DeviceProfile(_H200, _LLAMA_70B, 2, 0.534, 0.585, 0.005, 8.7e-6),
}


class SimulatedRunner:
    """Knows when the device will have done a step: it begins with one when it is done with the one before."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._done_at = 0.0  # time.monotonic()
        self.busy_s = 0.0  # as modelled; a late wake-up is the host's fault, and so idle time of the device

    def run(self, plan: StepPlan, _unread: ScriptReading | None) -> float:
        """Return when the step is done, by `time.monotonic()`."""
        seconds = self._profile.step_seconds(StepShape.of(plan))
        self.busy_s += seconds
        self._done_at = max(self._done_at, time.monotonic()) + seconds
        return self._done_at

    def clear(self, blocks: list[int]) -> None:
        """Nothing to clear."""


class ScriptReading:
    """What a step brings, at the time when it is done."""

    def __init__(self, done_at: float, sampled: Sampled) -> None:
        self._done_at = done_at
        self._sampled = sampled

    def read(self) -> Sampled:
        """Sleep until then, as the engine thread does while it waits for a device."""
        time.sleep(max(0.0, self._done_at - time.monotonic()))
        return self._sampled


class ScriptSampler:
    """Gives every sequence the same text, from its start and over and over; grammars have no effect on it."""

    def __init__(self, script: Ids[int]) -> None:
        self._script = tuple(script)

    def prepare(self, sequences: list[Sequence]) -> None:
        """Nothing to prepare."""

    def sample(self, done_at: float, sequences: list[Sequence], scored: list[ScoredChunk]) -> ScriptReading:
        """Return tokens that can be read when the step is done."""
        for chunk in scored:
            self._score(chunk)
        script = self._script
        sampled = Sampled(
            [script[sequence.output_len % len(script)] for sequence in sequences],
            {
                row: scripted_logprobs(script, sequence.output_len, count)
                for row, sequence in enumerate(sequences)
                if (count := sequence.request.sampling.num_logprobs) is not None
            },
        )
        return ScriptReading(done_at, sampled)

    def _score(self, chunk: ScoredChunk) -> None:
        sequence, start, count = chunk
        scores, wanted = sequence.prompt_logprobs, sequence.request.sampling.num_prompt_logprobs
        if scores is not None and wanted is not None:
            scores[start:] = [scripted_logprobs(sequence.token_ids, start + k, wanted) for k in range(count)]

    def close(self) -> None:
        """Nothing was taken."""


class SimulatedStepper(ContinuousBatcher[float, ScriptReading]):
    """The stepper of `--engine simulated`."""

    def __init__(self, config: EngineConfig, script: Ids[int], *, vocab_size: int, max_model_len: int) -> None:
        """Take the profile that `config` names.

        Raises:
            ValueError: there is no such profile.
        """
        if config.simulate not in PROFILES:
            raise ValueError(f"--simulate {config.simulate}: known are {', '.join(PROFILES)}")
        profile = PROFILES[config.simulate]
        self._runner_of_time = SimulatedRunner(profile)
        self._about = f"simulated {config.simulate}"
        super().__init__(
            Scheduler(
                BlockPool(profile.kv_capacity_tokens // BLOCK_SIZE, BLOCK_SIZE),
                max_num_seqs=config.max_num_seqs,
                max_prefill_tokens=config.max_num_batched_tokens,
            ),
            self._runner_of_time,
            ScriptSampler(script),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(),
            media=UncheckedMedia(),
            is_asynchronous=config.async_scheduling,
        )

    def device_seconds(self) -> float:
        return self._runner_of_time.busy_s

    def describe(self) -> dict[str, str]:
        return super().describe() | {"device": self._about}
