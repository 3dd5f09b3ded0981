"""A trainer in a process of its own, for `bench_refit`.

It holds weights of the model's names and shapes in one flat buffer, as a trainer with flat parameters does. On request
it hands them out over IPC: where they lie in that buffer, by a handle for each tensor, or packed into a double buffer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from engine_control.child import connection_from_descriptor
from engine_control.refit.backends.ipc import ALIGNMENT, IpcSender
from engine_control.refit.manifest import manifest_of
from engine_control.refit.payload.devices import device_uuid
from engine_control.refit.shared_buffers import CudaBuffer, HostBuffer
from engine_control.wire import PeerClosedError, receive_message, send_message


def main() -> None:
    connection = connection_from_descriptor(int(sys.argv[1]))
    weights: dict[str, torch.Tensor] = {}
    where: list[dict[str, Any]] = []
    flat: CudaBuffer | HostBuffer | None = None
    batches: Iterator[dict[str, Any]] = iter(())
    sender: IpcSender | None = None
    device = torch.device("cpu")
    try:
        while True:
            message = receive_message(connection)
            match message["do"]:
                case "hold":
                    device = torch.device(message["device"])
                    flat = buffer_for(message["names"], device)
                    weights = made(message["names"], flat.bytes, device)
                    where = places(weights, flat.bytes)
                    send_message(connection, {"bytes": sum(t.nbytes for t in weights.values())})
                case "manifest":
                    items = (("transformer", name, tensor) for name, tensor in weights.items())
                    send_message(connection, {"manifest": manifest_of(items)})
                case "flat":
                    assert flat is not None
                    send_message(connection, {"buffer": flat.handle, "tensors": where})
                case "handles":
                    send_message(connection, handles(weights, device))
                case "pack":
                    if sender is None:
                        sender = IpcSender(message["half_bytes"], device=device)
                    batches = sender.batches(list(weights.items()), module="transformer")
                    send_message(connection, {"info": next(batches, None)})
                case "next":
                    send_message(connection, {"info": next(batches, None)})
    except PeerClosedError:
        if sender is not None:
            sender.close()


def buffer_for(names: list[list[Any]], device: torch.device) -> CudaBuffer | HostBuffer:
    total = sum(-(-_nbytes(shape, dtype) // ALIGNMENT) * ALIGNMENT for _, shape, dtype in names)
    return CudaBuffer(total, device, 1) if device.type == "cuda" else HostBuffer(total)


def made(names: list[list[Any]], flat: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights of these names, shapes and dtypes, one behind the other in the buffer."""
    torch.manual_seed(1)
    weights, start = {}, 0
    for name, shape, dtype in names:
        count = _nbytes(shape, dtype)
        view = flat[start : start + count].view(getattr(torch, dtype)).view(shape)
        view.copy_(0.02 * torch.randn(shape, device=device))
        weights[name] = view
        start += -(-count // ALIGNMENT) * ALIGNMENT
    return weights


def places(weights: dict[str, torch.Tensor], flat: torch.Tensor) -> list[dict[str, Any]]:
    """Where each tensor lies in the buffer."""
    return [
        {
            "module": "transformer",
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "offset": tensor.data_ptr() - flat.data_ptr(),
        }
        for name, tensor in weights.items()
    ]


def _nbytes(shape: list[int], dtype: str) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def handles(weights: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """vLLM's form, as plain data: for each tensor the arguments of torch's `rebuild_cuda_tensor`, by GPU."""
    uuid = device_uuid(device)
    found = []
    for tensor in weights.values():
        arguments = list(reduce_tensor(tensor)[1])
        arguments[0] = arguments[4] = None
        arguments[1:3] = list(tensor.shape), list(tensor.stride())
        arguments[5] = str(tensor.dtype)
        found.append({uuid: arguments})
    return {
        "names": list(weights),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
        "shapes": [list(t.shape) for t in weights.values()],
        "ipc_handles": found,
    }
