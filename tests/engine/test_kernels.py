"""Which decode kernel a device gets, and that a kernel which computes something else is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_triton_kernel_follows_the_formulas_on_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.interpreted_triton"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all right"


def test_a_right_kernel_is_taken_and_a_wrong_one_is_not(
    torch: Any, kernel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from ftserve.engine import kernels
    from ftserve.engine.kv_cache import LayerShape

    cpu, shape = torch.device("cpu"), LayerShape(2, 64, 64)

    def wrong(*projections: Any, output: Any, **options: Any) -> None:
        kernel(*projections, output=output, **options)
        output[-1] += 0.1

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no image for this device")

    for dtype in (torch.float32, torch.bfloat16):
        assert kernels._is_right(kernel, cpu, dtype, shape)
        assert not caplog.text
        assert not kernels._is_right(wrong, cpu, dtype, shape)
        assert not kernels._is_right(failing, cpu, dtype, shape)
        assert caplog.text.count("stock operators") == 2
        caplog.clear()


def test_a_device_without_a_kernel_of_ours_gets_none(torch: Any) -> None:
    from ftserve.engine import kernels, triton_decode
    from ftserve.engine.kv_cache import LayerShape

    assert kernels.choose_decode_kernel(torch.device("cpu"), torch.float16, [LayerShape(2, 64, 64)]) is None
    assert kernels.choose_decode_kernel(torch.device("meta"), torch.float16, [LayerShape(2, 64, 64)]) is None
    cuda = torch.device("cuda")
    assert triton_decode.supports(cuda, torch.bfloat16, [LayerShape(8, 128, 128)])
    assert not triton_decode.supports(cuda, torch.bfloat16, [LayerShape(8, 192, 128)])
    assert not triton_decode.supports(cuda, torch.bfloat16, [LayerShape(1, 576, 576)])


@pytest.mark.gpu
def test_the_triton_kernel_follows_the_formulas_on_the_device(torch: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from ftserve.engine import kernels
    from ftserve.engine.kv_cache import LayerShape

    shapes = [LayerShape(8, 128, 128)]
    assert kernels.choose_decode_kernel(torch.device("cuda"), torch.bfloat16, shapes) is not None
