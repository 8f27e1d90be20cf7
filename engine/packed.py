"""Linear layers whose weights lie as oneDNN wants them, so that it does not rearrange them in every product.

For bfloat16 on the CPU, where products of a few rows gain most: one thread here, all weights of SmolLM2-135M, against
`F.linear`: 36 to 24 ms for 1 row, 75 to 55 ms for 32, 718 to 680 ms for 512.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ops = torch.ops.mkldnn  # torch's compiler uses these; they have no public names


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference only. Its `weight` has a shape and a type, and no content."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self.bias = linear.bias
        self._packed: Tensor = _ops._reorder_linear_weight(linear.weight.detach(), None)  # noqa: SLF001
        self._multiply = _ops._linear_pointwise.default  # noqa: SLF001

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self._multiply(rows, self._packed, self.bias, "none", [], "")
        return output


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether packing pays: bfloat16, on a CPU that computes with it."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return bool(_ops._is_mkldnn_bf16_supported())  # noqa: SLF001


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replace each plain linear layer of the model, freeing its weights one after another; return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
