"""Runs the Triton kernel on Triton's interpreter, which is on for a whole process or not at all; see test_kernels."""

from __future__ import annotations

import itertools
import sys

import torch

from ftserve.engine.triton_decode import TritonDecode
from tests.engine.test_native import test_kernel_follows_the_formulas as check

SHAPES = [(9, 3, 64, 16), (8, 1, 128, 16), (6, 2, 80, 16), (4, 2, 20, 5)]  # heads, kv_heads, head_dim, block_size
OPTIONS = [(None, None, False), (7, 5.0, False), (100, None, True)]  # window, softcap, has_sinks

if __name__ == "__main__":
    torch.set_num_threads(1)
    for shape, options in itertools.product(SHAPES, OPTIONS):
        for dtype, tokens, processors in (("float32", 5, 2), ("float16", 1, 60)):  # bfloat16 is not interpreted rightly
            check(torch, TritonDecode(processors), dtype, *shape, *options, tokens)
    sys.stdout.write("all right")
