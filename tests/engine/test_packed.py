from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def packed(torch: Any) -> Any:
    from ftserve.engine import packed

    if not packed.can_pack(torch.device("cpu"), torch.bfloat16):
        pytest.skip("this CPU does not compute with bfloat16")
    return packed


def test_only_bfloat16_on_the_cpu_is_packed(torch: Any) -> None:
    from ftserve.engine.packed import can_pack

    assert not can_pack(torch.device("cpu"), torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_the_same_products(torch: Any, packed: Any, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 96, bias=bias), torch.nn.Linear(96, 32, bias=bias)).bfloat16()
    x = torch.randn(1, rows, 48).bfloat16()
    with torch.inference_mode():
        wanted = model(x)
        assert packed.pack_linears(model) == 2
        torch.testing.assert_close(model(x), wanted, rtol=2e-2, atol=2e-2)
    assert model[0].weight.shape == (96, 48)
    assert model[0].weight.dtype == torch.bfloat16


def test_subclasses_of_linear_layers_are_left_alone(torch: Any, packed: Any) -> None:
    class Special(torch.nn.Linear):  # type: ignore[misc]
        pass

    model = torch.nn.Sequential(Special(4, 4))
    assert packed.pack_linears(model) == 0
