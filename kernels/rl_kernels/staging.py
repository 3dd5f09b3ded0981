"""What a device needs of the host's numbers goes there without anybody waiting."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device. The caller doesn't wait for what a GPU still has to do, and may change `tensor`."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
