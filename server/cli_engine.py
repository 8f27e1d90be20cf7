"""The command line's options about the engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ftserve.engine.config import ENGINE_KINDS, STEP_SIZES, TASKS, EngineConfig
from ftserve.engine.simulated import PROFILES


def add_engine_options(
    parser: argparse.ArgumentParser,
    *,
    count: Callable[[str], int],
    amount: Callable[[str], float],
    amount_or_none: Callable[[str], float],
    share: Callable[[str], float],
) -> None:
    """Add the group; the other arguments are argparse types for numbers in their ranges."""
    engine = EngineConfig()
    inside = parser.add_argument_group("engine")
    inside.add_argument(
        "--engine",
        choices=ENGINE_KINDS,
        default=engine.kind,
        help="null answers without a model; simulated does so at the pace of a GPU",
    )
    inside.add_argument(
        "--task", choices=TASKS, default=engine.task, help="what the model is for: chats and completions, or embeddings"
    )
    inside.add_argument(
        "--device", default=engine.device, help="auto, cpu, cuda or cuda:N; several, with commas, get an engine each"
    )
    inside.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default=engine.dtype, help="weights"
    )
    inside.add_argument("--max-model-len", type=count, default=None, help="tokens of prompt and output together")
    seqs, tokens = (", ".join(f"{kind} {sizes[k]}" for kind, sizes in STEP_SIZES.items()) for k in (0, 1))
    inside.add_argument(
        "--max-num-seqs", type=count, default=None, help=f"sequences that run at once; if not given: {seqs}"
    )
    inside.add_argument(
        "--max-num-batched-tokens", type=count, default=None, help=f"prompt tokens a step; if not given: {tokens}"
    )
    inside.add_argument(
        "--kv-cache-gb",
        type=amount,
        default=engine.kv_cache_gb,
        help="GB of the KV cache; if not given, 2 on the CPU and what is free on CUDA",
    )
    inside.add_argument(
        "--encoder-cache-gb",
        type=amount,
        default=engine.encoder_cache_gb,
        help="GB for what the tower has made of images or sound",
    )
    inside.add_argument(
        "--gpu-memory-utilization",
        type=share,
        default=engine.gpu_memory_utilization,
        help="share of a CUDA device's memory that the engine may use",
    )
    inside.add_argument(
        "--torch-threads",
        type=count,
        default=None,
        help="CPU threads of the model's operators; if not given, all but one",
    )
    inside.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=engine.async_scheduling,
        help="queue the next step before the tokens of the last one are read; a CPU has no queue",
    )
    inside.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=engine.cuda_graphs,
        help="replay decode steps on CUDA instead of launching them kernel by kernel",
    )
    inside.add_argument(
        "--null-step-ms", type=amount_or_none, default=engine.null_step_ms, help="null engine: time of a step"
    )
    inside.add_argument(
        "--null-echo",
        action=argparse.BooleanOptionalAction,
        default=engine.null_echo,
        help="null engine: answer with what the prompt has last between \u27e6 and \u27e7, if it has",
    )
    inside.add_argument(
        "--simulate",
        choices=tuple(PROFILES),
        default=engine.simulate,
        help="simulated engine: which device and model",
    )
    inside.add_argument(
        "--simulate-replicas",
        type=count,
        default=engine.simulate_replicas,
        help="simulated engine: how many of them share the load",
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return what the options say."""
    return EngineConfig(
        kind=options.engine,
        task=options.task,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs or STEP_SIZES[options.engine][0],
        max_num_batched_tokens=options.max_num_batched_tokens or STEP_SIZES[options.engine][1],
        kv_cache_gb=options.kv_cache_gb,
        encoder_cache_gb=options.encoder_cache_gb,
        gpu_memory_utilization=options.gpu_memory_utilization,
        torch_threads=options.torch_threads,
        async_scheduling=options.async_scheduling,
        cuda_graphs=options.cuda_graphs,
        null_step_ms=options.null_step_ms,
        null_echo=options.null_echo,
        simulate=options.simulate,
        simulate_replicas=options.simulate_replicas,
    )
