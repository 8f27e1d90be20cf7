"""Configuration of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Task = Literal["auto", "generate", "embed"]
TASKS: tuple[Task, ...] = ("auto", "generate", "embed")
EngineKind = Literal["torch", "null", "simulated"]
ENGINE_KINDS: tuple[EngineKind, ...] = ("torch", "null", "simulated")
STEP_SIZES: dict[EngineKind, tuple[int, int]] = {  # defaults of `max_num_seqs` and `max_num_batched_tokens`
    "torch": (64, 512),
    "null": (64, 512),
    "simulated": (1024, 8192),  # as engines choose them on the devices that it simulates
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine thread is told at its start. Values are copied into locals there."""

    kind: EngineKind = "torch"
    task: Task = "auto"  # what the model is used for; auto: what it was made for
    device: str = "auto"  # auto | cpu | cuda | cuda:N; several, with commas between them, get an engine each
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    max_model_len: int | None = None  # tokens of prompt and output together; None: what the model allows
    max_num_seqs: int = STEP_SIZES["torch"][0]  # sequences that run at once
    max_num_batched_tokens: int = STEP_SIZES["torch"][1]  # prefill tokens a step
    kv_cache_gb: float | None = None  # None: 2 of RAM on the CPU, what is free on CUDA
    gpu_memory_utilization: float = 0.9  # share of a CUDA device's memory that we may use
    async_scheduling: bool = True  # queue a device's next step before the tokens of the last one are read
    cuda_graphs: bool = True  # replay decode steps on CUDA instead of launching them kernel by kernel
    encoder_cache_gb: float = 0.5  # memory for what towers made of images and sound
    torch_threads: int | None = None  # CPU threads of the model's operators; None: the CPUs that we may use, less one
    null_step_ms: float = 0.0  # null engine: pause between steps
    null_echo: bool = False  # null engine: answer with what a prompt has between marks, see `server/engines.py`
    simulate: str = "h200-8b"  # simulated engine: a key of `simulated.PROFILES`
    simulate_replicas: int = 1  # simulated engine: how many of these, each with an engine of its own

    def resolve(self, *, model_max_len: int) -> EngineConfig:
        """Return a copy with `max_model_len` filled in and bounded by the model.

        Raises:
            ValueError: `max_model_len` is larger than the model's.
        """
        wanted = self.max_model_len
        if wanted is not None and wanted > model_max_len:
            raise ValueError(f"--max-model-len {wanted} is more than the model's {model_max_len}")
        return replace(self, max_model_len=wanted or model_max_len)

    def by_device(self) -> list[EngineConfig]:
        """Return a configuration for each of the devices."""
        if self.kind == "simulated":
            return [self] * self.simulate_replicas
        return [replace(self, device=device.strip()) for device in self.device.split(",")]
