"""What a memory mechanism owes the saver: storage that can be emptied and filled again.

The saver decides what is released, keeps the backups and restores them; a mechanism only frees memory and gets it back.
The engine's thread alone calls it, between two steps.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

import torch

from engine_control.registry import Registry


class MemoryMechanism(ABC):
    """Frees tensors' memory and gets it back; the tensor objects, and all views of them, stay.

    While a tag is released nobody touches its memory: what is read is arbitrary, and on a GPU the process may end.
    """

    keeps_addresses: ClassVar[bool]
    """Whether tensors lie at the same address afterwards, so that CUDA graphs that read them stay valid."""

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            InvalidRequestError: the mechanism doesn't work on this device, or its library is missing.
        """
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.device = device if device.type == "cuda" else torch.device(device.type)

    def region(self, tag: str) -> AbstractContextManager[object]:
        """Around the allocations of what will be released under that tag."""
        return nullcontext()

    def adopt(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027  most need not move anything
        """Prepares tensors for `release`: afterwards each has memory that can be freed. Views and ties among them hold;
        a tensor that is not among them and shared memory with one that had to move doesn't any more.

        Raises:
            InsufficientMemoryError: there is no room for the copy; what had moved until then stays moved, bits and all.
        """

    @abstractmethod
    def release(self, tag: str, tensors: Sequence[torch.Tensor]) -> int:
        """Frees the memory of all tensors of that tag, whose contents are lost. Returns the bytes that are free now,
        for other processes too. The device has finished all work on them."""

    @abstractmethod
    def resume(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Gets the memory back, contents undefined. The tensors are those of the tag's `release`.

        Raises:
            InsufficientMemoryError: it doesn't fit; nothing was kept, and a retry may succeed.
        """

    def free_bytes(self) -> int:
        """What is free on the device now, as its driver (or, on a CPU, the kernel) sees it."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_ram()


mechanisms: Registry[MemoryMechanism] = Registry(
    "engine_control.memory",
    MemoryMechanism,  # type: ignore[type-abstract]
    noun="memory mechanism",
    skip=("saver", "backup"),
)
"""`host` (storage swap, any device) and `vmm` (torch-memory-saver, CUDA)."""


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages behind the tensors, in order of first appearance."""
    return list({storage_key(t): t.untyped_storage() for t in tensors}.values())


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two living tensors just when they share a storage, whether it has memory at the moment or not."""
    return int(tensor.untyped_storage()._cdata)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's memory as a uint8 tensor [n], sharing it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def move(tensors: Sequence[torch.Tensor], allocate: Callable[[int], torch.UntypedStorage]) -> None:
    """Copies the tensors into storages from `allocate(bytes)`; the tensor objects stay, with strides and bits.

    Tensors whose bytes overlap share a new storage as they shared the old one; others get one each, even if they were
    pieces of one file. Old storages are let go one by one.
    """
    unique = {id(t): t for t in tensors if t.numel()}
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in unique.values():
        groups.setdefault(storage_key(tensor), []).append(tensor)
    clusters = [cluster for group in groups.values() for cluster in _overlapping(group)]
    for cluster in clusters:
        _move_cluster(cluster, allocate)


def _move_cluster(cluster: Sequence[torch.Tensor], allocate: Callable[[int], torch.UntypedStorage]) -> None:
    unit = max(t.element_size() for t in cluster)
    start = min(_extent(t)[0] for t in cluster) // unit * unit  # offsets count elements
    end = max(_extent(t)[1] for t in cluster)
    fresh = allocate(end - start)
    as_bytes(fresh).copy_(as_bytes(cluster[0].untyped_storage())[start:end])
    for tensor in cluster:
        offset = tensor.storage_offset() - start // tensor.element_size()
        placed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = placed.set_(fresh, offset, tensor.size(), tensor.stride())


def _overlapping(group: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The group in parts that have no byte in common."""
    parts: list[list[torch.Tensor]] = []
    reached = -1
    for tensor in sorted(group, key=lambda t: _extent(t)):
        start, end = _extent(tensor)
        if start >= reached:
            parts.append([])
        parts[-1].append(tensor)
        reached = max(reached, end)
    return parts


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the tensor within its storage, and the one after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    first = tensor.storage_offset()
    return first * tensor.element_size(), (first + reach) * tensor.element_size()


def available_ram() -> int:
    """MemAvailable of Linux (proc(5)): what can be had without swapping. Elsewhere unknown, so no limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else sys.maxsize
