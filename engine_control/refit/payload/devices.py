"""Which GPU of this process is meant: two processes may number, or see, different ones, so a UUID says it."""

from __future__ import annotations

import torch

from engine_control.errors import RefitRefusedError


def plain_uuid(uuid: object) -> str:
    """The UUID in lower case, without `GPU-` or `MIG-` before it."""
    text = str(uuid).lower()
    return text.removeprefix("gpu-").removeprefix("mig-")


def device_uuid(device: torch.device) -> str | None:
    """The UUID of a CUDA device in plain form; None of any other device."""
    if device.type != "cuda":
        return None
    return plain_uuid(torch.cuda.get_device_properties(device).uuid)


def local_index(device: object, *, field: str) -> int:
    """The index in this process of a CUDA device that another process named by its UUID, or by its index.

    Raises:
        RefitRefusedError: this process sees no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if type(device) is int and 0 <= device < count:
        return device
    if isinstance(device, str):
        for index in range(count):
            if plain_uuid(torch.cuda.get_device_properties(index).uuid) == plain_uuid(device):
                return index
    raise RefitRefusedError(
        f"this process sees {count} CUDA devices, and not the one that the tensor lies on",
        field=field,
        value=device,
        hint="Send from the same host and GPU, or send safetensors.",
    )


def release_imports(device: torch.device) -> None:
    """Waits until the device has read what was queued, and hands memory of other processes that nobody holds back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()
