"""The exchange of tokens for heads by writing other GPUs' memory: no copy into a buffer to send, none out of one that
came, and nothing for the host to do, so that a CUDA graph can hold it.

Each rank has buffers that every other rank has mapped (CUDA IPC). A kernel writes what a rank needs to where that rank
reads it; then all ranks meet on the device. A buffer is written again only after its rank has come to a later meeting,
behind whatever read it: to heads, meet, attention, to tokens, meet, the copy of those, to heads, ...
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import msgspec
import torch

from diffusion_rl.parallel.exchange import Streams
from diffusion_rl.parallel.shards import Shards
from engine_control.errors import EngineDiedError, EngineError, EngineFaultError
from engine_control.groups import RankGroup
from engine_control.refit.payload.devices import release_imports
from engine_control.refit.shared_buffers import CudaBuffer, open_buffer
from rl_kernels import exchange as kernels
from rl_kernels.fused import triton_is_installed

logger = logging.getLogger(__name__)

GROWTH = 1.25  # of a buffer that has become too small
GRAIN = 2 << 20


class Memory(Protocol):
    """Buffers that every rank of a group can write, and a place where the ranks meet."""

    group: RankGroup

    def buffer(self, name: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's buffer of that name, flat uint8 of at least so many bytes, and the addresses of every rank's,
        int64 `[size]` on the device. All ranks ask for the same sizes in one order; one that grows moves, and lies in
        its old place as well for graphs that were captured with it."""

    def meet(self) -> None:
        """What any rank wrote before is there for what this rank does after."""

    def give_back(self) -> None:
        """As `Exchange.give_back`."""

    def check(self) -> None:
        """As `Exchange.check`."""

    def abort(self) -> None:
        """As `Exchange.abort`."""


class PeerExchange:
    """An `Exchange` through memory that all ranks write."""

    capturable = True

    def __init__(self, memory: Memory) -> None:
        self.group = memory.group
        self._memory = memory
        self._last = ""  # buffer that was written

    def to_heads(self, tensors: tuple[torch.Tensor, ...], shards: Shards, streams: Streams) -> torch.Tensor:
        lying, like = _lying(shards, streams), tensors[0]
        batch, heads, _, width = like.shape
        shape = (len(tensors), batch, heads // self.group.size, lying.tokens, width)
        mine, ranks = self._room("heads", like, shape)
        for index, x in enumerate(tensors):
            kernels.push_heads(x, ranks, lying, which=index, rank=self.group.rank)
        self._meet(sum(x.nbytes for x in tensors))
        return mine

    def to_tokens(self, attended: torch.Tensor, shards: Shards, streams: Streams) -> torch.Tensor:
        lying = _lying(shards, streams)
        batch, heads, _, width = attended.shape
        shape = (batch, lying.of_rank, heads * self.group.size, width)
        mine, ranks = self._room("tokens", attended, shape)
        kernels.push_tokens(attended, ranks, lying, rank=self.group.rank)
        self._meet(mine.nbytes)
        return mine.clone().transpose(1, 2)

    def gather(self, share: torch.Tensor, shards: Shards, streams: Streams) -> torch.Tensor:
        lying, size = _lying(shards, streams), self.group.size
        batch, _, width = share.shape
        mine, ranks = self._room("gathered", share, (1, batch, 1, lying.tokens, width))
        everywhere = share.unsqueeze(1).expand(-1, size, -1, -1)  # each rank's "head" is all of it
        kernels.push_heads(everywhere, ranks, lying, which=0, rank=self.group.rank)
        self._meet(share.nbytes * size)
        return mine.reshape(batch, lying.tokens, width).clone()

    def give_back(self) -> None:
        self._memory.give_back()

    def check(self) -> None:
        self._memory.check()

    def abort(self) -> None:
        self._memory.abort()

    def _room(self, name: str, like: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's buffer of that name as a tensor, and the addresses of all. It may be written at once."""
        if name == self._last:
            self._memory.meet()  # no call of another kind has let the ranks meet since they began to read it
        self._last = name
        nbytes = like.element_size()
        for length in shape:
            nbytes *= length
        buffer, ranks = self._memory.buffer(name, nbytes)
        return buffer[:nbytes].view(like.dtype).view(shape), ranks

    def _meet(self, nbytes: int) -> None:
        """Counts as a collective that spread so many bytes evenly."""
        self._memory.meet()
        self.group.traffic.count(nbytes // self.group.size * (self.group.size - 1))


class CudaMemory:
    """Memory of GPUs that can reach each other, over NVLink or PCIe."""

    def __init__(self, group: RankGroup, device: torch.device, *, timeout_s: float) -> None:
        """Every rank makes it at the same time, or gets the same error.

        Raises:
            EngineFaultError: a rank can't map another one's memory.
        """
        self.group = group
        self._device = device
        self._timeout_s = timeout_s
        self._buffers: dict[str, _Shared] = {}
        self._outgrown: list[_Shared] = []
        self._stop = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)
        self._flags = _Shared(group, device, GRAIN)
        self._flags.own.zero_()
        agreed(group, device, "")  # nobody says that it has come before all flags are zero

    def buffer(self, name: str, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._buffers.get(name)
        if found is None or found.own.numel() < nbytes:
            if found is not None:
                self._outgrown.append(found)
                nbytes = int(nbytes * GROWTH)
            found = self._buffers[name] = _Shared(self.group, self._device, -(-nbytes // GRAIN) * GRAIN)
        return found.own, found.addresses

    def meet(self) -> None:
        flags, rank = self._flags.addresses, self.group.rank
        kernels.meet(flags, self._turns, self._stop, rank=rank, timeout_s=self._timeout_s)

    def give_back(self) -> None:
        release_imports(self._device)  # nobody writes behind a forward's last meeting, which this rank has come to
        self._buffers.clear()
        self._outgrown.clear()
        release_imports(self._device)

    def check(self) -> None:
        if self._stop[1]:
            raise EngineDiedError("a rank did not come to an exchange", hint="The engine must be started anew.")

    def abort(self) -> None:
        self._stop[0] = 1


class _Shared:
    """A buffer of each rank's, mapped by all: `own`, and the addresses of all here, int64 `[size]`."""

    def __init__(self, group: RankGroup, device: torch.device, nbytes: int) -> None:
        """
        Raises:
            EngineFaultError: on every rank, if one can't allocate, export or map.
        """
        self._mapped: list[torch.Tensor] = []
        handle: dict[str, Any] = {}
        reason = ""
        try:
            buffer = CudaBuffer(nbytes, device, group.size - 1)  # an export that nobody opens is never given back
            self.own, handle = buffer.bytes, buffer.handle
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        agreed(group, device, reason)
        handles = exchanged(group, device, handle)
        here = {"device_uuid": device.index}  # it is mapped for this rank's device, wherever it lies
        try:
            for rank, other in enumerate(handles):
                own, place = rank == group.rank, group.rank - (group.rank > rank)  # among those that `rank` exports to
                self._mapped.append(self.own if own else open_buffer(other | here, place, device))
        except EngineError as error:
            reason = str(error)
        agreed(group, device, reason)
        addresses = [mapped.data_ptr() for mapped in self._mapped]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)


def exchanged(group: RankGroup, device: torch.device, said: Any) -> list[Any]:
    """What every rank says, in their order: something that JSON can carry."""
    text = msgspec.json.encode(said)
    lengths = group.all_gather(torch.tensor([len(text)], device=device)).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(padded.to(device)).cpu()
    return [msgspec.json.decode(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def agreed(group: RankGroup, device: torch.device, obstacle: str) -> None:
    """Returns when all ranks have come, if none has an obstacle.

    Raises:
        EngineFaultError: naming the first rank that has one.
    """
    for rank, found in enumerate(exchanged(group, device, obstacle)):
        if found:
            raise EngineFaultError(f"rank {rank} can't share memory with the others: {found}")


def peer_memory(group: RankGroup, device: torch.device, *, timeout_s: float) -> CudaMemory | None:
    """Memory that these ranks share, each on a GPU of its own; None, on every rank, if one of them can't."""
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    try:
        agreed(group, device, _obstacle(exchanged(group, device, device.index), device))
        return CudaMemory(group, device, timeout_s=timeout_s)
    except EngineFaultError as error:
        logger.warning("ranks exchange tokens by collectives: %s", error)
        return None


def _obstacle(devices: list[int], device: torch.device) -> str:
    """Why this rank can't reach the others' memory; empty if it seems that it can."""
    if not triton_is_installed():
        return "there is no Triton"
    far = [d for d in devices if d != device.index and not torch.cuda.can_device_access_peer(device, d)]
    return f"{device} has no peer access to {far}" if far else ""


def _lying(shards: Shards, streams: Streams) -> kernels.Streams:
    numbers = [number for stream in streams for number in (shards.share(stream), shards.count(stream))]
    return kernels.Streams(*numbers)
