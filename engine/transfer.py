"""Between the host's memory and a device's, without waiting for the device. Engine thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Return `array` as a tensor on `device`; the caller may go on to change the array, except on the CPU.

    By way of pinned memory: from other memory CUDA copies only when the device has done all that it was asked before.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Readback:
    """Tensors on their way to the host, behind what the device was asked for until now."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cpu":
            self._arrived = list(tensors)
            return
        self._arrived = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[list[Any]]:
        """Return the tensors as lists, once the device is that far."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.tolist() for tensor in self._arrived]
