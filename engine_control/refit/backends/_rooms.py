"""What transports share that have some of a call's tensors on their way while others are applied: the groups in which
tensors go, and the memory that they come into."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

AHEAD = 2  # groups on their way at a time

T = TypeVar("T")


def grouped(things: Iterable[T], size: Callable[[T], int], *, over: float, most: float = math.inf) -> Iterator[list[T]]:
    """The things in their order, in groups that end as soon as they are larger than `over` together, or `most`."""
    group: list[T] = []
    total = 0
    for thing in things:
        group.append(thing)
        total += size(thing)
        if total > over or len(group) >= most:
            yield group
            group, total = [], 0
    if group:
        yield group


class Rooms:
    """Flat memory for what comes or goes: `AHEAD` buffers by turns, each kept and as large as was asked for."""

    def __init__(self, device: torch.device, nbytes: int = 0) -> None:
        """nbytes: what each will have to hold, as far as it is known."""
        self._device = device
        self._nbytes = nbytes
        self._buffers: deque[torch.Tensor | None] = deque([None] * AHEAD)

    def take(self, nbytes: int) -> torch.Tensor:
        """Room `[nbytes]` uint8, in the memory of what was taken `AHEAD` turns before."""
        buffer = self._buffers.popleft()
        self._nbytes = max(self._nbytes, nbytes)
        if buffer is None or buffer.numel() < nbytes:
            buffer = None  # it goes before the larger one comes
            buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._buffers.append(buffer)
        return buffer[:nbytes]
