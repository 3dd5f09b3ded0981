"""Files that threads read ahead of whom applies their tensors, load by load.

For a host, threads read one load straight into its memory while the one before is applied. For a GPU they read pieces
into a ring of pinned slots, of a size that no tensor changes, and each piece goes over the link as soon as it is read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle, tee
from typing import Protocol, TypeVar

import torch

from engine_control.refit.backends._rooms import AHEAD, Rooms

LOAD_BYTES = 4 << 20  # from which on a load is full: little enough to lie in a cache until it is applied
DEVICE_LOAD_BYTES = 128 << 20  # of a load to a GPU, which is a launch
PIECE_BYTES = 8 << 20  # that a thread reads at a time
SLOTS = 16  # of the ring: half of them being read, half on their way to the GPU
READERS = 8  # at most: one thread copies out of the page cache at a fifth of a link's rate


class Load(Protocol):
    """Bytes of a file whose tensors are applied together."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, view: memoryview) -> None:
        """Fills `view` from the load's byte `start` on. Called by several threads at once.

        Raises:
            EngineError: the file doesn't have the bytes any more.
        """


L = TypeVar("L", bound=Load)


def onto_host(loads: Iterable[L], *, reuse: bool) -> Generator[tuple[L, torch.Tensor], None, None]:
    """Each load with its bytes, uint8 on the CPU, which hold until the next load is asked for; without `reuse` they are
    memory of their own."""
    rooms, coming = Rooms(torch.device("cpu")), deque[tuple[L, torch.Tensor, list[Future[None]]]]()
    with _readers() as readers:
        for load in loads:
            room = rooms.take(load.nbytes) if reuse else torch.empty(load.nbytes, dtype=torch.uint8)
            works = [readers.submit(load.read, s, memoryview(room[s:e].numpy())) for s, e in _pieces(load)]
            coming.append((load, room, works))
            if len(coming) == AHEAD:
                yield _arrived(*coming.popleft())
        while coming:
            yield _arrived(*coming.popleft())


def onto_device(loads: Iterable[L], room: torch.Tensor) -> Generator[tuple[L, torch.Tensor], None, None]:
    """Each load with its bytes in `room`, uint8 on a GPU, as large as the largest load. They hold for what is launched
    on the current stream before the next load is asked for."""
    for_readers, for_room = tee(loads)
    with _readers() as readers, closing(_staged(for_readers, room.device, readers)) as staged:
        for load in for_room:
            for start, end in _pieces(load):
                slot = next(staged)
                room[start:end].copy_(slot.raw[: end - start], non_blocking=True)
                slot.copied = _mark(room.device)
            yield load, room[: load.nbytes]


def room_on(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Memory of a GPU, uint8; None where there isn't as much."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


class _Slot:
    """Host memory for a piece, pinned for a GPU. copied: after which it may be overwritten."""

    def __init__(self, device: torch.device) -> None:
        self.raw = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copied: torch.cuda.Event | None = None

    def view(self, nbytes: int) -> memoryview:
        """Room for bytes, when nobody reads what was there."""
        if self.copied is not None:
            self.copied.synchronize()
        return memoryview(self.raw[:nbytes].numpy())


def _staged(loads: Iterable[Load], device: torch.device, readers: Executor) -> Generator[_Slot, None, None]:
    """The slot of each piece of the loads, in order, with its bytes in it. It is the taker's until half of the ring's
    slots have been taken after it, or until `copied`, whichever is later."""
    slots = cycle([_Slot(device) for _ in range(SLOTS)])
    reading = deque[tuple[_Slot, Future[None]]]()
    for load in loads:
        for start, end in _pieces(load):
            if len(reading) == SLOTS // 2:
                yield _read(*reading.popleft())
            slot = next(slots)
            reading.append((slot, readers.submit(load.read, start, slot.view(end - start))))
    while reading:
        yield _read(*reading.popleft())


def _read(slot: _Slot, work: Future[None]) -> _Slot:
    work.result()
    return slot


def _arrived(load: L, room: torch.Tensor, works: list[Future[None]]) -> tuple[L, torch.Tensor]:
    for work in works:
        work.result()
    return load, room


def _pieces(load: Load) -> list[tuple[int, int]]:
    """Where in the load each piece begins and ends."""
    return [(start, min(start + PIECE_BYTES, load.nbytes)) for start in range(0, load.nbytes, PIECE_BYTES)]


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def _readers() -> Iterator[Executor]:
    """Threads that only read. Afterwards none of them reads any more."""
    pool = ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0))), thread_name_prefix="weights")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
