"""Where the contents of released memory wait: pinned host memory for a GPU, an unlinked file for a CPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import torch

from engine_control.errors import InsufficientMemoryError
from engine_control.memory.base import as_bytes, available_ram

logger = logging.getLogger(__name__)
ALIGNMENT = 512  # bytes; copies of whole blocks are the fastest
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
WRITE_LIMIT = 2**30  # Linux moves no more than 2 GiB a call


class Backup(ABC):
    """Keeps the bytes of a list of storages until they are dropped. Room is reused from one cycle to the next."""

    @abstractmethod
    def save(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Holds a copy of all bytes afterwards.

        Raises:
            InsufficientMemoryError: there is no room for them; `drop` gives back what was taken.
        """

    @abstractmethod
    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """The storages, in the order and of the sizes of `save`, have their bytes again. The copy is still held."""

    @abstractmethod
    def drop(self) -> None:
        """The copy is not needed any more."""

    @abstractmethod
    def close(self) -> None:
        """Gives back all room. Afterwards the object is not used again."""


class FileBackup(Backup):
    """A file without a name in `folder` (the system's folder for temporary files if None).

    A copy in RAM would free nothing on a CPU. The file's dirty pages are the kernel's, which writes and drops them when
    memory is needed; in a tmpfs they'd be RAM all the same. What was dropped takes no room.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def save(self, storages: Sequence[torch.UntypedStorage]) -> None:
        needed = sum(storage.nbytes() for storage in storages)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  kept open
            offset = 0
            for storage in storages:
                offset = self._write(_memory(storage), offset)
        except OSError as error:
            raise InsufficientMemoryError(
                f"the backup of {needed} bytes can't be written to {self._folder or tempfile.gettempdir()}: {error}",
                hint="Make room there, name another folder for temporary files, or release without a backup.",
            ) from error

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        offset = 0
        for storage in storages:
            offset = self._read(_memory(storage), offset)

    def drop(self) -> None:
        if self._file is not None:
            self._file.truncate(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: memoryview, offset: int) -> int:
        while data:
            done = os.pwrite(self._number(), data[:WRITE_LIMIT], offset)
            data, offset = data[done:], offset + done
        return offset

    def _read(self, data: memoryview, offset: int) -> int:
        while data:
            done = os.preadv(self._number(), [data[:WRITE_LIMIT]], offset)
            if not done:
                raise RuntimeError(f"the backup ends at byte {offset}, before all that was written to it")
            data, offset = data[done:], offset + done
        return offset

    def _number(self) -> int:
        assert self._file is not None, "nothing was saved"
        return self._file.fileno()


class SlabBackup(Backup):
    """One slab of host memory, made at the first `save`, made anew only when it is too small, and kept until `close`.

    pinned: page-locked, so that copies run at the link's rate. Locking is slow (seconds for tens of GB), hence one
    slab.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slab: torch.Tensor | None = None
        self._locked = False

    def save(self, storages: Sequence[torch.UntypedStorage]) -> None:
        needed = sum(_aligned(storage.nbytes()) for storage in storages)
        slab = self._slab
        if slab is None or slab.numel() < needed:
            self.close()
            slab, self._locked = host_slab(needed, pinned=self._pinned, what="the backup")
            self._slab = slab
        offset = 0
        for storage in storages:
            slab[offset : offset + storage.nbytes()].copy_(as_bytes(storage), non_blocking=True)
            offset += _aligned(storage.nbytes())
        _finish(storages)

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        assert self._slab is not None, "nothing was saved"
        offset = 0
        for storage in storages:
            as_bytes(storage).copy_(self._slab[offset : offset + storage.nbytes()], non_blocking=True)
            offset += _aligned(storage.nbytes())
        _finish(storages)

    def drop(self) -> None:
        pass  # the slab is kept: making it is what takes time

    def close(self) -> None:
        if self._slab is not None and self._locked:
            unpin([self._slab])
        self._slab, self._locked = None, False


def host_slab(size: int, *, pinned: bool, what: str) -> tuple[torch.Tensor, bool]:
    """`size` bytes of host memory, uint8 on a page's boundary, and whether they are page-locked: if that was asked for
    and can be had. It has the exact size, where torch's own pinned allocations are rounded up to a power of two.

    Raises:
        InsufficientMemoryError: the host has less; `what` is named as what needs it.
    """
    free = available_ram()
    if size > free:
        raise InsufficientMemoryError(
            f"{what} needs {size} bytes of host memory, {free} are free", hint="Make room on the host, or do without."
        )
    slab = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    if not pinned:
        return slab, False
    status = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), size, PORTABLE))
    if status:
        logger.warning("%d bytes of host memory can't be pinned (CUDA error %d): copies are slow", size, status)
        with suppress(RuntimeError):  # takes the error, or the next kernel launch would report it
            torch.zeros(1, device="cuda")
    return slab, status == 0


def unpin(slabs: Sequence[torch.Tensor]) -> None:
    """Unlocks what `host_slab` has locked. No copy may be reading it."""
    for slab in slabs:
        torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a CPU's storage. Not by way of numpy, which would bar the storage from ever being resized."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _finish(storages: Sequence[torch.UntypedStorage]) -> None:
    """Returns when the copies are done. They run on the current stream of each storage's device."""
    for device in {storage.device for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
