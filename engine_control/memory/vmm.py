"""torch-memory-saver: physical memory goes and comes back under addresses that stay reserved (CUDA, cuMemMap).

Tensors keep their addresses, so CUDA graphs that read them stay valid, and both ways take milliseconds whatever the
size. The package's own backups copy through pageable memory and are left off: the saver copies faster.

Facts of the package (0.0.10) that this file respects: it ends the process when a tag is paused twice, when something
that isn't paused is resumed, when memory can't be had (also for a tensor that is made inside a region: see that the
model fits), and when memory of a region is freed while it is paused; it doesn't work with expandable segments; in its
`torch` mode what is allocated inside a region lies in a pool of that tag, and the whole pool goes.
"""

from __future__ import annotations

import importlib
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch

from engine_control.errors import ConflictError, InsufficientMemoryError, InvalidRequestError
from engine_control.memory.base import MemoryMechanism, move

PACKAGE = "torch_memory_saver"
MARGIN_BYTES = 64 * 2**20  # a pool grows by whole segments, at most 20 MiB too much; the driver needs some itself
WAY_OUT = "Use the memory mechanism 'host', which works everywhere."


class TorchMemorySaver(MemoryMechanism):
    """Pauses and resumes the pool of a tag. Its bytes are those of the pool, whose segments are multiples of 2 MiB."""

    keeps_addresses: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise InvalidRequestError(
                f"the memory mechanism 'vmm' needs a CUDA device, not {device}",
                field="device",
                value=str(device),
                hint=WAY_OUT,
            )
        super().__init__(device)
        self._native = _load()
        self._prefix = uuid.uuid4().hex[:8]  # the package knows one name space for all engines of a process
        self._anchors: dict[str, torch.Tensor] = {}  # one byte in each pool, by which it is found
        self._paused: dict[str, int] = {}  # bytes that a resume needs
        self._check_that_it_works()

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """What this thread allocates inside will go with the tag, also what is freed again before.

        Raises:
            ConflictError: the tag is released; its pool has addresses without memory.
        """
        if tag in self._paused:
            raise ConflictError(f"nothing can be allocated under {tag!r} while it is released", hint="Resume it first.")
        with torch.cuda.device(self.device), self._native.region(tag=self._name(tag), enable_cpu_backup=False):
            if tag not in self._anchors:
                self._make_room(MARGIN_BYTES)
                self._anchors[tag] = torch.empty(1, dtype=torch.uint8, device=self.device)
            yield

    def adopt(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Copies what was allocated outside of the tag's region into it."""
        with self.region(tag):
            pass
        segments = sorted(self._segments(tag), key=lambda segment: int(segment["address"]))
        starts = [int(segment["address"]) for segment in segments]

        def lies_here(address: int) -> bool:
            before = bisect_right(starts, address) - 1
            return before >= 0 and _lies_in(address, segments[before])

        strays = [t for t in tensors if not lies_here(t.untyped_storage().data_ptr())]
        if strays:
            with self.region(tag):
                move(strays, self._allocate)
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    def release(self, tag: str, tensors: Sequence[torch.Tensor]) -> int:
        """The bytes are the device's reading before and after, which sees what other processes do meanwhile."""
        before = self.free_bytes()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what lies outside of all pools; those of regions aren't touched
            if tag in self._anchors and tag not in self._paused:
                self._paused[tag] = sum(int(segment["total_size"]) for segment in self._segments(tag))
                self._native.pause(self._name(tag))
        return max(0, self.free_bytes() - before)

    def resume(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Looks whether it fits before it asks, since the package ends the process if not. Another process that takes
        the memory in between is not guarded against."""
        if tag not in self._paused:
            return
        self._make_room(self._paused[tag] + MARGIN_BYTES)
        with torch.cuda.device(self.device):
            self._native.resume(self._name(tag))
        del self._paused[tag]

    def _check_that_it_works(self) -> None:
        """
        Raises:
            InvalidRequestError: torch's allocator is set up so that a region has no effect, or the package can't start.
        """
        probe = torch.empty(1, dtype=torch.uint8, device=self.device)  # the allocator has a segment to look at
        if any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
            raise _unusable("torch's allocator uses expandable segments", "Unset it in PYTORCH_CUDA_ALLOC_CONF, or use")
        del probe
        try:
            with self.region("probe"):
                pass
            self._segments("probe")
        except (RuntimeError, OSError, AssertionError) as error:
            raise _unusable(str(error), "Mend that, or use") from error

    def _segments(self, tag: str) -> list[dict[str, Any]]:
        """The segments of the tag's pool, as torch's allocator lists them."""
        snapshot = [s for s in torch.cuda.memory_snapshot() if s["device"] == self.device.index]
        address = self._anchors[tag].data_ptr()
        pools = [tuple(s["segment_pool_id"]) for s in snapshot if _lies_in(address, s)]
        if not pools or pools[0] == (0, 0):
            raise RuntimeError("allocations inside a region don't go to a pool of their own")
        return [s for s in snapshot if tuple(s["segment_pool_id"]) == pools[0]]

    def _allocate(self, size: int) -> torch.UntypedStorage:
        self._make_room(size + MARGIN_BYTES)
        return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()

    def _make_room(self, needed: int) -> None:
        """
        Raises:
            InsufficientMemoryError: the device has less, even without what torch's allocator caches.
        """
        if self.free_bytes() < needed:
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()
        free = self.free_bytes()
        if free < needed:
            raise InsufficientMemoryError(
                f"{needed} bytes are needed ({MARGIN_BYTES} of them to spare), {free} are free on {self.device}"
            )

    def _name(self, tag: str) -> str:
        return f"{self._prefix}/{tag}"


def _load() -> Any:
    """The package's one object, in the mode that needs no preloaded library."""
    try:
        native = importlib.import_module(PACKAGE).torch_memory_saver
    except ImportError as error:
        raise InvalidRequestError(
            f"the memory mechanism 'vmm' needs the package torch-memory-saver: {error}",
            field="mechanism",
            value="vmm",
            hint=f"pip install torch-memory-saver. {WAY_OUT}",
        ) from error
    with suppress(AttributeError, AssertionError):  # somebody in this process has started it, in a mode of theirs
        native.hook_mode = "torch"
    return native


def _unusable(reason: str, way: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the memory mechanism 'vmm' can't be used in this process: {reason}",
        field="mechanism",
        value="vmm",
        hint=f"{way} the memory mechanism 'host'.",
    )


def _lies_in(address: int, segment: dict[str, Any]) -> bool:
    return bool(segment["address"] <= address < segment["address"] + segment["total_size"])
