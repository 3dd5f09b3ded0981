"""Memory that goes without a library's help, on any device.

On a GPU each storage is shrunk to nothing and grown again later, elsewhere: CUDA graphs that read the tensors must be
captured again. On a CPU the tensors are moved into anonymous pages of their own, once, and the kernel is told to take
these pages (madvise(2), MADV_DONTNEED): resident memory falls by what was released, whatever malloc's thresholds are.
Shrinking them would do too, but a stray read of a released tensor would then end the process (here it finds zeros), and
a storage that was once seen by numpy can't be shrunk at all.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from engine_control.errors import InsufficientMemoryError
from engine_control.memory.base import MemoryMechanism, move, storages_of


class HostStorageSwap(MemoryMechanism):
    """Frees storages by `resize_(0)` on a GPU, by `madvise` on a CPU."""

    keeps_addresses: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._emptied: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        self._pages: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by address, while a tensor lives

    def adopt(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """On a CPU, copies every tensor into pages of its own that isn't in such pages yet, and gives back what malloc
        has free then. On a GPU, moves what torch didn't allocate."""
        strays = [t for t in tensors if not self._ours(t.untyped_storage())]
        if strays:
            move(strays, self._allocate)
            self._give_back()

    def release(self, tag: str, tensors: Sequence[torch.Tensor]) -> int:
        """On CUDA the bytes are the device's reading before and after, which sees what other processes do meanwhile; on
        a CPU they are counted. What malloc or torch's allocator has free goes too."""
        before = self.free_bytes()
        emptied = [(storage, storage.nbytes()) for storage in storages_of(tensors)]
        self._emptied[tag] = emptied
        self._empty(emptied)
        if self.device.type == "cuda":
            return max(0, self.free_bytes() - before)
        return sum(size for _, size in emptied)

    def resume(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        emptied = self._emptied.get(tag, [])
        needed = sum(size for _, size in emptied)
        if self.device.type == "cpu":
            # The kernel would grant it in any case, and kill a process later, when the pages are touched.
            if needed > self.free_bytes():
                raise self._does_not_fit(tag, needed)
        else:
            try:
                for storage, size in emptied:
                    storage.resize_(size)
            except torch.OutOfMemoryError as error:
                self._empty(emptied)
                raise self._does_not_fit(tag, needed) from error
        self._emptied.pop(tag, None)

    def _ours(self, storage: torch.UntypedStorage) -> bool:
        if self.device.type == "cpu":
            return storage.data_ptr() in self._pages
        return bool(storage.resizable())

    def _allocate(self, size: int) -> torch.UntypedStorage:
        try:
            if self.device.type != "cpu":
                return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, torch.OutOfMemoryError) as error:
            raise InsufficientMemoryError(
                f"a tensor of {size} bytes can't be copied into memory that can be released: "
                f"{self.free_bytes()} bytes are free on {self.device}",
                hint="Make room there, or run without the memory saver.",
            ) from error
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        self._pages[storage.data_ptr()] = pages
        return storage

    def _empty(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        for storage, _ in storages:
            if self.device.type == "cpu":
                self._pages[storage.data_ptr()].madvise(mmap.MADV_DONTNEED)
            else:
                storage.resize_(0)
        self._give_back()

    def _give_back(self) -> None:
        """What is free in this process is free for others afterwards."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()
        elif self.device.type == "cpu":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; its thresholds don't bind it
            if trim is not None:
                trim(0)

    def _does_not_fit(self, tag: str, needed: int) -> InsufficientMemoryError:
        return InsufficientMemoryError(
            f"{needed} bytes are needed for {tag!r}, {self.free_bytes()} are free on {self.device}",
            field="tags",
            value=tag,
        )
