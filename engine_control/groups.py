"""How ranks exchange tensors: two collectives over gloo or NCCL, in process groups of this engine's own.

The groups are made beside torch's default process group, never as it: a trainer may have one of its own in the same
process, and so may a second engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllToAllOptions, FileStore, PrefixStore

LOOPBACK = "127.0.0.1"  # all ranks are processes of one machine


@dataclass
class Traffic:
    """What a rank has sent to others since the start, and the calls it took."""

    bytes_sent: int = 0
    collectives: int = 0

    def count(self, bytes_sent: int) -> None:
        """One more collective."""
        self.add(Traffic(bytes_sent, 1))

    def add(self, more: Traffic) -> None:
        self.bytes_sent += more.bytes_sent
        self.collectives += more.collectives

    def take_back(self, before: Traffic) -> Traffic:
        """Returns to what stood there `before`; the difference."""
        more = Traffic(self.bytes_sent - before.bytes_sent, self.collectives - before.collectives)
        self.bytes_sent, self.collectives = before.bytes_sent, before.collectives
        return more


class RankGroup:
    """`size` ranks that exchange tensors of equal shapes. Every rank of the group makes the same calls in one order."""

    def __init__(self, backend: Any, rank: int, size: int, *, through_host: bool, can_hang: bool = False) -> None:
        """through_host: the backend takes CPU tensors only; those of a GPU are copied there and back. can_hang: it
        would wait for a rank that is gone."""
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._backend = backend
        self._through_host = through_host
        self._can_hang = can_hang

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """x `[size, ...]`: part r goes to rank r. The result `[size, ...]` holds at r what rank r sent here."""
        given = self._outgoing(x)
        received = torch.empty_like(given)
        options = AllToAllOptions()
        options.asyncOp = False
        _settle(self._backend.alltoall_base(received, given, [], [], options))
        self.traffic.count(given.nbytes // self.size * (self.size - 1))
        return received.to(x.device)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[size, *x.shape]`: every rank's x, in rank order, the same on every rank."""
        given = self._outgoing(x)
        gathered = given.new_empty(self.size, *given.shape)
        options = AllgatherOptions()
        options.asyncOp = False
        flat = gathered.view(-1), given.view(-1)  # of a list of tensors NCCL would make copies
        _settle(self._backend._allgather_base(*flat, options))
        self.traffic.count(given.nbytes * (self.size - 1))
        return gathered.to(x.device)

    def all_can(self, able: bool, device: torch.device) -> bool:
        """Whether every rank is able; a collective of tensors on that device."""
        return bool(self.all_gather(torch.tensor([able], dtype=torch.uint8, device=device)).all())

    def abort(self) -> None:
        """Ends a collective that waits for a rank that is gone, if the backend can, and the group with it; callable
        from any thread, and again."""
        if self._can_hang:  # gloo sees by itself that a rank has closed its connection
            self._backend.abort()

    def _outgoing(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() if self._through_host else x).contiguous()


def _settle(work: Any) -> None:
    """Afterwards a collective that isn't asynchronous is over, or on a GPU is over for what is launched after it: NCCL
    has put it on the current stream, between what stands there, and leaves nothing to wait for."""
    if work is not None:
        work.wait()


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one engine meet: a file in a directory that only their user may enter."""

    path: str
    ranks: int
    timeout_s: float

    def join(self, name: str, rank: int, size: int, device: torch.device, *, shared_device: bool) -> RankGroup:
        """The group `name`, as its member `rank`; returns when all `size` members have come.

        On GPUs the backend is NCCL, unless ranks share one (`shared_device`), which NCCL refuses: then, and on CPUs,
        it is gloo over the loopback interface.
        """
        store = PrefixStore(name, FileStore(self.path, self.ranks))
        timeout = timedelta(seconds=self.timeout_s)
        if device.type == "cuda" and not shared_device:
            return RankGroup(_nccl(store, rank, size, timeout), rank, size, through_host=False, can_hang=True)
        return RankGroup(_gloo(store, rank, size, timeout), rank, size, through_host=device.type != "cpu")


def _gloo(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
