"""The size of the KV cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftserve.engine.config import EngineConfig
from ftserve.engine.kv_cache import LayerShape
from tests.engine.conftest import Tiny

SHAPES = [LayerShape(2, 64, 64)] * 4  # 4 * 2 * 128 elements a token: 32 KiB a block of 16 in float16


def test_what_the_operator_says_counts_on_every_device(torch: Any) -> None:
    from ftserve.engine.capacity import cache_bytes

    for device in ("cpu", "cuda"):
        model: Any = SimpleNamespace(device=torch.device(device))
        assert cache_bytes(EngineConfig(kv_cache_gb=0.5), model) == 500_000_000


def test_a_cpu_has_a_default(torch: Any) -> None:
    from ftserve.engine.capacity import cache_bytes

    assert cache_bytes(EngineConfig(), SimpleNamespace(device=torch.device("cpu"))) == 2_000_000_000  # type: ignore[arg-type]


def test_cuda_gives_its_share_less_what_is_used_and_what_a_step_takes(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftserve.engine import capacity

    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 80 * gib))
    monkeypatch.setattr(capacity, "_step_bytes", lambda model, tokens, rows: (tokens + rows) * 1000)
    config = EngineConfig(gpu_memory_utilization=0.9, max_num_batched_tokens=2000, max_num_seqs=100)
    model: Any = SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(sub_configs={}))
    assert capacity.cache_bytes(config, model) == pytest.approx(52 * gib - 2_200_000, abs=2)


def test_the_largest_step_runs_without_a_cache(torch: Any, tiny: Tiny) -> None:
    from ftserve.engine import attention
    from ftserve.engine.capacity import run_step

    assert run_step(tiny.model, 96, 8).shape == (8, 128)
    assert tiny.model.config._attn_implementation == attention.IMPLEMENTATION


def test_blocks_are_what_fits_less_the_null_block(torch: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ftserve.engine.capacity import count_blocks

    assert count_blocks(SHAPES, torch.float16, 10 * 32768 + 100, max_model_len=144) == 9
    assert not caplog.text
    assert count_blocks(SHAPES, torch.float16, 10 * 32768, max_model_len=145) == 9
    assert "less than the context of 145" in caplog.text
    for too_little in (2 * 32768 - 1, 0, -5):
        with pytest.raises(ValueError, match="--kv-cache-gb"):
            count_blocks(SHAPES, torch.float16, too_little, max_model_len=10)
