"""Our own CPU kernel for decode attention: built once for the machine, kept in the cache, called through ctypes.

Where it cannot be built (no compiler), the engine runs on stock operators and says so at start.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftserve.engine.builtin import cache_root
from ftserve.engine.kv_cache import LayerShape

log = logging.getLogger("ftserve.engine")

_SOURCE = Path(__file__).with_name("paged_decode.cpp")
# Sums may be reordered to be vectorized; nothing may assume that there is no NaN, which must come through.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_TIMEOUT_S = 120

DTYPES = (torch.float32, torch.bfloat16)

_VOID_P = ctypes.c_void_p
_I64 = ctypes.c_int64
_I32 = ctypes.c_int32


class Task(ctypes.Structure):
    """Mirror of `Task` in paged_decode.cpp, which says what the fields mean."""

    _fields_ = (
        *((name, _VOID_P) for name in ("query", "new_key", "new_value", "keys", "values", "output")),
        *((name, _VOID_P) for name in ("tables", "lens", "sinks")),
        *((name, _I64) for name in ("query_head_stride", "query_token_stride")),
        *((name, _I64) for name in ("key_head_stride", "key_token_stride")),
        *((name, _I64) for name in ("value_head_stride", "value_token_stride", "table_stride")),
        *((name, _I32) for name in ("tokens", "heads", "kv_heads", "head_dim", "block_size")),
        *((name, _I32) for name in ("window", "splits", "is_bfloat16")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class CppDecode:
    """The `DecodeKernel` of a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call: Callable[..., Any] = library.ftserve_paged_decode
        self._call.argtypes = (ctypes.POINTER(Task), _VOID_P)
        self._call.restype = None
        self._parallel = _parallel_of_torch()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lens: Tensor,
        output: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """See `DecodeKernel`; tensors are of one of `DTYPES`."""
        heads, tokens, head_dim = query.shape
        _, block_size, kv_heads, _ = keys.shape
        task = Task(
            query=query.data_ptr(),
            new_key=key.data_ptr(),
            new_value=value.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            output=output.data_ptr(),
            tables=tables.data_ptr(),
            lens=lens.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            query_head_stride=query.stride(0),
            query_token_stride=query.stride(1),
            key_head_stride=key.stride(0),
            key_token_stride=key.stride(1),
            value_head_stride=value.stride(0),
            value_token_stride=value.stride(1),
            table_stride=tables.stride(0),
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            window=window or 0,
            splits=kv_heads if tokens < 4 * torch.get_num_threads() else 1,
            is_bfloat16=query.dtype == torch.bfloat16,
            scaling=scaling,
            softcap=softcap or 0.0,
        )
        self._call(task, self._parallel)


def supports(device: torch.device, dtype: torch.dtype, shapes: list[LayerShape]) -> bool:
    """Tell whether the kernel is for such a cache."""
    return device.type == "cpu" and dtype in DTYPES and all(shape.key_dim == shape.value_dim for shape in shapes)


def load_decode_kernel() -> CppDecode | None:
    """Return the kernel, building it first where the cache lacks it (seconds); None where it cannot be built."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.warning("no C++ compiler: decode attention runs on stock operators, several times slower")
        return None
    library = cache_root() / "kernels" / f"paged_decode-{_key(compiler)}.so"
    try:
        if not library.is_file():
            _build(compiler, library)
        return CppDecode(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("decode attention runs on stock operators, several times slower: %s", exc)
        return None


def _key(compiler: str) -> str:
    """Return a name for what the library depends on: source, compiler, flags and the processor's abilities."""
    stat = Path(shutil.which(compiler) or compiler).resolve()
    parts = (_SOURCE.read_text(encoding="utf-8"), str(stat), *_FLAGS, platform.machine(), _cpu_abilities())
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_abilities() -> str:
    """Return what -march=native looks at, as Linux tells it; elsewhere nothing, and the cache is the machine's own."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(compiler: str, library: Path) -> None:
    """Compile into a temporary name and rename: who comes second overwrites with the same."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [*compiler.split(), *_FLAGS, "-o", str(fresh), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)  # noqa: S603 - our words
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-300:]}")
        fresh.replace(library)


def _parallel_of_torch() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded; None: run on one thread.

    A second runtime would bring threads of its own, and its idle ones would spin against torch's.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps if "libgomp" in line or "libiomp5" in line}
    if len(paths) != 1:
        log.warning("decode attention runs on one thread: %d OpenMP runtimes are loaded", len(paths))
        return None
    return ctypes.cast(ctypes.CDLL(paths.pop()).GOMP_parallel, _VOID_P).value
