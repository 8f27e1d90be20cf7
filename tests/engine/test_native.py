from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest


def attend_plainly(
    torch: Any, query: Any, keys: Any, values: Any, tables: Any, lens: Any, *, window: Any, softcap: Any, sinks: Any
) -> Any:
    """Attend one token after the other, by the formulas, in float32."""
    outputs = []
    for token, length in enumerate(lens.tolist()):
        key = keys[tables[token].long()].flatten(0, 1)[:length].float()
        value = values[tables[token].long()].flatten(0, 1)[:length].float()
        group = query.shape[0] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("hd,lhd->hl", query[:, token].float(), key) * 0.2
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[:, : max(0, length - window)] = -math.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        outputs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, :length], value))
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 8, 4), (8, 1, 128, 16), (6, 2, 80, 16), (4, 2, 20, 5), (2, 2, 256, 1)],
)
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (7, None, False), (None, 5.0, True), (100, None, True)]
)
@pytest.mark.parametrize("tokens", [1, 5])  # one is cut up by heads, five are not
def test_kernel_follows_the_formulas(
    torch: Any,
    kernel: Any,
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    tokens: int,
) -> None:
    type_ = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(type_)

    lens = torch.tensor([200, 64, 1, 63, 65][:tokens])
    longest = -(-200 // block_size)
    keys, values = random(1200 // block_size, block_size, kv_heads, head_dim), None
    values = random(*keys.shape)
    tables = torch.randperm(len(keys), generator=generator)[: tokens * longest].view(tokens, longest).int()
    query = random(1, tokens, heads, head_dim).transpose(1, 2)[0]  # strided, as models hand it over
    key, value = random(tokens, kv_heads, head_dim).transpose(0, 1), random(kv_heads, tokens, head_dim)
    sinks = random(heads).float() if has_sinks else None
    output = torch.empty(tokens, heads, head_dim, dtype=type_)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    before = keys.clone()
    kernel(query, key, value, keys=keys, values=values, tables=tables, lens=lens, output=output, scaling=0.2, **options)
    wanted = attend_plainly(torch, query, keys, values, tables, lens, **options)
    assert float((output.float() - wanted).abs().max()) < (3e-6 if dtype == "float32" else 2e-2)
    rows = [
        int(tables[i, (n - 1) // block_size]) * block_size + (n - 1) % block_size for i, n in enumerate(lens.tolist())
    ]
    assert torch.equal(keys.flatten(0, 1)[rows], key.transpose(0, 1))
    assert torch.equal(values.flatten(0, 1)[rows], value.transpose(0, 1))
    keys.flatten(0, 1)[rows] = before.flatten(0, 1)[rows]
    assert torch.equal(keys, before)


@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_nan_comes_through(torch: Any, kernel: Any, where: str) -> None:
    tensors = {
        "query": torch.ones(2, 2, 8),
        "keys": torch.zeros(8, 4, 1, 8),
        "values": torch.zeros(8, 4, 1, 8),
    }
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    if where == "query":
        tensors["query"][:, 0] = math.nan
    else:
        tensors[where][2, 0] = math.nan
    output = torch.empty(2, 2, 8)
    kernel(
        tensors["query"],
        torch.ones(1, 2, 8),
        torch.ones(1, 2, 8),
        keys=tensors["keys"],
        values=tensors["values"],
        tables=tables,
        lens=torch.tensor([6, 6]),
        output=output,
        scaling=1.0,
        window=None,
        softcap=None,
        sinks=None,
    )
    assert bool(output[0].isnan().all())
    assert bool(output[1].isfinite().all())


def test_without_a_compiler_there_is_no_kernel(
    torch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from ftserve.engine import native

    monkeypatch.setenv("FTSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    assert native.load_decode_kernel() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.load_decode_kernel() is None
    assert caplog.text.count("stock operators") == 2
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_is_built_once(torch: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ftserve.engine import native

    monkeypatch.setenv("FTSERVE_CACHE", str(tmp_path))
    assert native.load_decode_kernel() is not None
    [library] = tmp_path.rglob("*.so")
    made = library.stat().st_mtime_ns
    assert native.load_decode_kernel() is not None
    assert library.stat().st_mtime_ns == made
    assert [path.name for path in library.parent.iterdir()] == [library.name]
