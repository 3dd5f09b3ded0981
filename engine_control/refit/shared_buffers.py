"""Memory of one process in another: the two ends of a buffer, as handles of plain data that JSON can carry."""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.payload.devices import device_uuid, local_index
from engine_control.refit.payload.rebuild import rebuild_cuda_tensor
from engine_control.refit.payload.serializer import from_text

FIELD = "buffer"
NAME = "engine-weights-"
TOKEN = re.compile(r"[0-9a-f]{32}")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_BYTES = 1 << 46
COUNTER_FIELDS = ("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")


class HostBuffer:
    """A sender's buffer in host memory: an anonymous file, which ends with the last process that has it open."""

    def __init__(self, nbytes: int) -> None:
        token = secrets.token_hex(16)
        self._descriptor = os.memfd_create(NAME + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, nbytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.bytes = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)
        where = {"pid": os.getpid(), "descriptor": self._descriptor}
        self.handle = {"kind": "memfd", "token": token, "bytes": nbytes, **where}

    def close(self) -> None:
        """Afterwards nobody can open it any more; who has it keeps it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.bytes = -1, torch.empty(0, dtype=torch.uint8)


class CudaBuffer:
    """A sender's buffer on a GPU, exported once to each rank of the receiving engine."""

    def __init__(self, nbytes: int, device: torch.device, receivers: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        storage = self.bytes.untyped_storage()
        self.handle = {
            "kind": "cuda",
            "token": secrets.token_hex(16),
            "bytes": nbytes,
            "device_uuid": device_uuid(self.bytes.device),
            "exports": [_export(storage._share_cuda_()) for _ in range(receivers)],
        }

    def close(self) -> None:
        """Drops it. The memory is free when the receivers have unmapped it too."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


def token_of(handle: object) -> str:
    """What tells one buffer from another.

    Raises:
        RefitRefusedError: the handle has none.
    """
    token = handle.get("token") if isinstance(handle, Mapping) else None
    if not isinstance(token, str) or not TOKEN.fullmatch(token):
        raise RefitRefusedError("not a buffer's handle", field=FIELD, value=token, hint="Make it with IpcSender.")
    return token


def open_buffer(handle: Mapping[str, Any], rank: int, device: torch.device) -> torch.Tensor:
    """The sender's buffer, flat uint8: its memory, not a copy. It is unmapped with the last reference to it.

    Raises:
        RefitRefusedError: it isn't there, isn't what the handle says, or can't be reached from `device`'s process.
    """
    nbytes = handle.get("bytes")
    if type(nbytes) is not int or not 0 < nbytes <= MAX_BYTES:
        raise RefitRefusedError("not a buffer's size", field=FIELD, value=nbytes)
    if handle.get("kind") == "memfd":
        return _open_file(handle, nbytes)
    if handle.get("kind") == "cuda":
        refuse_cpu(device)
        exports = handle.get("exports")
        if not isinstance(exports, Sequence) or isinstance(exports, str) or rank >= len(exports):
            raise RefitRefusedError(
                f"the buffer was not exported to rank {rank}",
                field=FIELD,
                value=len(exports) if isinstance(exports, Sequence) else None,
                hint="Make the sender for as many receivers as the engine has ranks.",
            )
        export = exports[rank]
        if not isinstance(export, Mapping):
            raise RefitRefusedError("not an export of a CUDA buffer", field=FIELD)
        reference = [export.get(name) for name in COUNTER_FIELDS]
        view = [None, [nbytes], [1], 0, None, "uint8", handle.get("device_uuid")]
        memory = [export.get(name) for name in ("handle", "storage_bytes", "storage_offset")]
        return open_cuda([*view, *memory, False, *reference])
    raise RefitRefusedError("unknown kind of buffer", field=FIELD, value=handle.get("kind"), hint="memfd or cuda.")


def open_cuda(arguments: Sequence[Any]) -> torch.Tensor:
    """The tensor of the arguments of torch's `rebuild_cuda_tensor` as plain data, with bytes as base64 or as they are.

    Raises:
        RefitRefusedError: they can't be used on this process's devices.
    """
    if isinstance(arguments, str) or not isinstance(arguments, Sequence) or len(arguments) != 15:
        raise RefitRefusedError("not the 15 arguments of a CUDA IPC handle", field="ipc_handles")
    given = list(arguments)
    if isinstance(given[5], str):
        given[5] = getattr(torch, given[5].removeprefix("torch."), None)
    for index in (7, 11, 13):  # the handles of the memory, of its reference counter, of the event
        given[index] = from_text(given[index], field="ipc_handles") if given[index] is not None else None
    given[6] = local_index(given[6], field="ipc_handles")
    try:
        return rebuild_cuda_tensor(*given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RefitRefusedError(
            f"the CUDA IPC handle can't be opened: {str(error).splitlines()[0]}",
            field="ipc_handles",
            hint="The sender must live, on this host and another process, and its memory be of plain cudaMalloc.",
        ) from error


def refuse_cpu(device: torch.device) -> None:
    """Refuses CUDA memory on a rank that has no GPU."""
    if device.type != "cuda":
        raise RefitRefusedError(
            f"CUDA memory for a rank on {device}", field=FIELD, value=str(device), hint="Send host memory instead."
        )


def _open_file(handle: Mapping[str, Any], nbytes: int) -> torch.Tensor:
    pid, number = handle.get("pid"), handle.get("descriptor")
    if type(pid) is not int or type(number) is not int or pid <= 0 or number < 0:
        raise RefitRefusedError("not a process and its descriptor", field=FIELD, value=f"{pid}, {number}")
    path = f"/proc/{pid}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}{token_of(handle)} "):
            raise RefitRefusedError("that descriptor is another file", field=FIELD, value=path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RefitRefusedError(
            f"the sender's buffer can't be opened: {error.strerror}",
            field=FIELD,
            value=path,
            hint="The sender must live, on this host, as the same user, and see the same processes (one container).",
        ) from error
    try:
        if os.fstat(descriptor).st_size < nbytes or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise RefitRefusedError("the buffer is smaller than it says, or not sealed", field=FIELD, value=nbytes)
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except OSError as error:  # no seals: not such a file
        raise RefitRefusedError(f"the buffer can't be mapped: {error.strerror}", field=FIELD, value=path) from error
    finally:
        os.close(descriptor)


def _export(shared: tuple[Any, ...]) -> dict[str, Any]:
    _, handle, storage_bytes, storage_offset, *reference = shared
    plain = {"handle": handle, "storage_bytes": storage_bytes, "storage_offset": storage_offset}
    plain.update(zip(COUNTER_FIELDS, reference, strict=True))
    return {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in plain.items()}
