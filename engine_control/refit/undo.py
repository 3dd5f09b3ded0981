"""The old bytes of weights that were written, until the commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

Key = tuple[str, str]
"""A module's name and a tensor's."""

ALIGNMENT = 256  # bytes, of each tensor's copy
ROOM_BYTES = 1 << 30  # allocated at once, or a tensor's
DEVICE_MARGIN_BYTES = 1 << 30  # of a GPU's free memory, left to everything else


class Kept(NamedTuple):
    """A live tensor, and where its old bytes have room: in flat memory of its dtype from element `start` on."""

    live: torch.Tensor
    room: torch.Tensor
    start: int

    @property
    def address(self) -> int:
        return int(self.room.data_ptr() + self.start * self.room.element_size())

    @property
    def old(self) -> torch.Tensor:
        """Of the live one's shape and dtype, in row-major order."""
        if self.live.is_contiguous():  # one call instead of two
            return self.room.as_strided(self.live.shape, self.live.stride(), self.start)
        return self.room[self.start : self.start + self.live.numel()].view(self.live.shape)


class UndoLog:
    """Copies beside the weights, on the host of those that lie there; of weights on a GPU where there is no room for
    more, in pinned host memory."""

    def __init__(self) -> None:
        self._old: dict[Key, list[Kept]] = {}
        self.place: Literal["device", "host"] = "device"

    def room_for(self, lives: Sequence[torch.Tensor]) -> list[Kept]:
        """A place for the old bytes of each, of which nothing is copied or noted yet."""
        on_gpu = [live for live in lives if live.device.type == "cuda"]
        if on_gpu and self.place == "device":
            device = on_gpu[0].device
            free, _ = torch.cuda.mem_get_info(device)
            unused = _unused_by_torch(device)
            if free + unused < sum(live.nbytes for live in on_gpu) + DEVICE_MARGIN_BYTES:
                self.place = "host"
        if self.place == "device":
            try:
                return _allocated(lives, on_host=False)
            except torch.OutOfMemoryError:  # what is free is in pieces
                self.place = "host"
        return _allocated(lives, on_host=True)

    def note(self, keys: Iterable[Key], kept: Iterable[Kept]) -> None:
        """These hold the old bytes now, or will before anything that the device is given from now on."""
        for key, one in zip(keys, kept, strict=True):
            self._old.setdefault(key, []).append(one)

    def restore(self, keys: Iterable[Key]) -> None:
        """Afterwards those weights are as they were; what had not been written stays. The last that was written is the
        first: two names may be of the same memory."""
        wanted = set(keys)
        for key in [key for key in reversed(self._old) if key in wanted]:
            for kept in reversed(self._old.pop(key)):
                kept.live.copy_(kept.old)

    def restore_all(self) -> None:
        """Afterwards everything is as it was."""
        self.restore(self._old)


def _unused_by_torch(device: torch.device) -> int:
    """Bytes that torch has of the GPU and nobody has of torch; not by the calls that flatten all statistics first."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"])


def _allocated(lives: Sequence[torch.Tensor], *, on_host: bool) -> list[Kept]:
    """Room for each in its order, in as few allocations as hold `ROOM_BYTES`."""
    places: dict[int, Kept] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, int]]] = {}
    for index, live in enumerate(lives):
        unit = ALIGNMENT // live.element_size()
        size = -(-live.numel() // unit) * unit
        alike.setdefault((live.device, live.dtype), []).append((index, size))
    for (device, dtype), sizes in alike.items():
        where: dict[str, Any] = {"pin_memory": device.type == "cuda"} if on_host else {"device": device}
        for part in _parts(sizes, ROOM_BYTES // dtype.itemsize):
            room = torch.empty(sum(size for _, size in part), dtype=dtype, **where)
            start = 0
            for index, size in part:
                places[index] = Kept(lives[index], room, start)
                start += size
    return [places[index] for index in range(len(lives))]


def _parts(sizes: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """The indices with their sizes in their order, in parts of up to `most` together, or one alone."""
    part: list[tuple[int, int]] = []
    total = 0
    for index, size in sizes:
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append((index, size))
        total += size
    if part:
        yield part
