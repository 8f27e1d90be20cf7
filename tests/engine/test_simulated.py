"""The simulated device: its time agrees with published throughputs, and the real scheduler runs over it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftserve.engine.config import EngineConfig
from ftserve.engine.scheduler import StepPlan
from ftserve.engine.sequence import Sequence
from ftserve.engine.simulated import PROFILES, DeviceProfile, SimulatedStepper, StepShape
from ftserve.engine.types import FinishReason, GenerationRequest, MediaSpan, SamplingParams, TokenEvent

# Output tokens per second under maximum load, Llama 3.1, by lengths of prompt and output. From NVIDIA TensorRT-LLM,
# docs/source/performance/perf-overview.md at commit 258c7540 (release 0.17): FP8 on H200 and H100, FP16 on A100; tensor
# parallel size 1 for 8B; for 70B 2 on H200 and 4 on H100 and A100.
LENGTHS = (
    *((128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000)),
    *((2048, 128), (2048, 2048), (5000, 500), (20000, 2000)),
)
PUBLISHED = {
    "a100-8b": (6627, 5256, 3454, 4277, 3787, 800, 2424, 825, 330),
    "h100-8b": (28837, 21109, 13594, 16501, 15245, 3557, 9488, 3559, 1401),
    "h200-8b": (29526, 25399, 17371, 21021, 17538, 3794, 11969, 3988, 1804),
    "a100-70b": (2733, 2811, 1976, 2276, 1922, 325, 1394, 393, 212),
    "h100-70b": (11128, 11512, 7439, 9837, 7431, 1303, 5480, 1603, 920),
    "h200-70b": (6823, 8290, 6527, 6848, 5165, 809, 4184, 1025, 641),
}
MAX_BATCH = 2048


def throughput(profile: DeviceProfile, prompt: int, output: int) -> float:
    """Return output tokens per second in the steady state: as many sequences as memory holds, at all their ages."""
    batch = min(MAX_BATCH, profile.kv_capacity_tokens / (prompt + output / 2))
    prefill = batch * prompt / output
    shape = StepShape(
        prefill_tokens=round(prefill),
        prefill_context=round(prefill * prompt / 2),
        decodes=round(batch),
        decode_context=round(batch * (prompt + output / 2)),
        sampled=round(batch),
    )
    return batch / profile.step_seconds(shape)


@pytest.mark.parametrize("name", PROFILES)
def test_throughput_is_within_12_percent_of_what_was_published(name: str) -> None:
    for (prompt, output), published in zip(LENGTHS, PUBLISHED[name], strict=True):
        assert throughput(PROFILES[name], prompt, output) == pytest.approx(published, rel=0.125)


def make_request(prompt: list[int], max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(request_id="r", index=0, prompt_ids=prompt, sampling=sampling, lane=0, route=None)


def make_stepper(**options: Any) -> SimulatedStepper:
    return SimulatedStepper(EngineConfig(kind="simulated", **options), [5, 6, 7], vocab_size=100, max_model_len=1000)


def drain(stepper: SimulatedStepper) -> list[TokenEvent]:
    events = []
    while stepper.num_running() or stepper.num_waiting():
        events += stepper.step()
    return events


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_sequences_get_the_script_and_the_device_is_busy_for_the_time_of_their_steps(async_scheduling: bool) -> None:
    stepper, request = make_stepper(async_scheduling=async_scheduling), make_request([1] * 40, 4)
    stepper.add(request)
    events = drain(stepper)
    assert [event.token_ids for event in events] == [(5,), (6,), (7,), (5,)]
    assert events[-1].finish_reason is FinishReason.LENGTH
    profile = PROFILES["h200-8b"]
    prefill = profile.step_seconds(StepShape(prefill_tokens=40, prefill_context=40 * 40 // 2, sampled=1))
    decodes = [profile.step_seconds(StepShape(decodes=1, decode_context=c, sampled=1)) for c in (40, 41, 42)]
    assert stepper.device_seconds() == pytest.approx(prefill + sum(decodes))


def test_a_repeated_prompt_is_found_in_the_prefix_cache() -> None:
    stepper = make_stepper()
    cached = []
    for _ in range(2):
        stepper.add(make_request(list(range(90)), 1))
        cached.append(drain(stepper)[0].num_cached_tokens)
    assert cached == [0, 80]


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="h300: known are a100-8b"):
        SimulatedStepper(EngineConfig(simulate="h300"), [1], vocab_size=2, max_model_len=9)


def test_it_needs_no_torch() -> None:
    code = "import sys, ftserve.engine.simulated; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-X", "gil=0", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_images_cost_their_tokens_and_the_vision_tower() -> None:
    item: Any = SimpleNamespace(num_tokens=64)
    plans = []
    for media in ((), (MediaSpan(item, 10),)):
        sequence = Sequence(replace(make_request([1] * 100, 1), media=media), arrival=0, max_model_len=200)
        sequence.num_computed = 20
        plans.append(StepPlan(prefills=[(sequence, 60)]))
    assert [StepShape.of(plan).media_tokens for plan in plans] == [0, 54]
    text, image = (PROFILES["h200-8b"].step_seconds(StepShape.of(plan)) for plan in plans)
    assert image > text
