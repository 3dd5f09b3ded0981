"""Weights by broadcast, from a trainer's rank 0 to every rank of the engine, in a process group of their own."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch.distributed import TCPStore

from engine_control.errors import ConflictError, InvalidRequestError, RefitRefusedError
from engine_control.refit.backends._calls import (
    Announced,
    Loader,
    Said,
    announced_again,
    as_is,
    items,
    load_format,
    of_rank,
    one_module,
    refuse_modes,
)
from engine_control.refit.backends._group import BACKENDS, BroadcastError, BroadcastGroup, Meeting, listening_store
from engine_control.refit.backends._rooms import AHEAD, Rooms, grouped
from engine_control.refit.backends.base import TransportContext, WeightItem, WeightTransport
from engine_control.refit.payload.layout import (
    as_bytes,
    check_booleans,
    of_bytes,
)

GROUP = "weight_update_group"
PACKED_BYTES = 1 << 30  # of vLLM's packed form, unless the trainer says otherwise
FLAT = "flattened_bucket"
LOAD_BYTES = 256 << 20  # from which on a load is full
LOAD_BROADCASTS = 64  # at most: a GPU's queue of launches is full after some hundreds, and then nobody can time out
ALIGNMENT = 256  # bytes, of each broadcast in a load's buffer


@dataclass
class Channel:
    """A joined group, and how its trainer sends. packed_bytes: of vLLM's packed form; None if it isn't that."""

    group: BroadcastGroup
    packed_bytes: int | None = None
    last: Said = field(default_factory=Said)


class DistributedTransport(WeightTransport):
    """`init` joins a group, of which a trainer is rank 0; `receive` takes the tensors that it broadcasts.

    A call whose fields are refused has received nothing. If the trainer has begun to broadcast then, the group is out
    of step: destroy it and init again. A tensor that is refused for what it is ends the call, but the rest is received.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._channels: dict[str, Channel] = {}

    def init(self, info: Mapping[str, Any]) -> None:
        """`info`: master_address, master_port, rank_offset (the group's rank of this engine's rank 0), world_size;
        group_name, backend (`nccl` or `gloo`); packed and packed_buffer_size_bytes, as vLLM's trainers send them."""
        meeting, packed = self._meeting(info), self._packed(info)
        try:
            group = BroadcastGroup(meeting, self.context.device)
        except (RuntimeError, OSError) as error:
            raise RefitRefusedError(
                f"the group could not meet at {meeting.address}:{meeting.port} as rank {meeting.rank} of "
                f"{meeting.world_size} within {meeting.timeout_s:g} s: {_first_line(error)}",
                code="rendezvous_failed",
                field="master_address",
                value=f"{meeting.address}:{meeting.port}",
                hint="All ranks must join at the same time; can this host reach that address?",
            ) from error
        self._channels[meeting.name] = Channel(group, packed)

    def receive(self, info: Mapping[str, Any]) -> Iterator[WeightItem]:
        """`info`: names, dtypes (or dtype_names), shapes, group_name, target_modules; `load_format`: null (a broadcast
        for each tensor), `flattened_bucket` (one for all), or an allowed loader."""
        refuse_modes(info)
        info = of_rank(info, self.context)
        name = str(info.get("group_name") or GROUP)
        channel = self._channels.get(name)
        if channel is None:
            raise RefitRefusedError(
                f"group {name!r} is not one of those that are open: {sorted(self._channels)}",
                code="unknown_group",
                field="group_name",
                value=name,
                hint="Call init_weights_update_group first.",
            )
        form, loader = load_format(info, self.context, (FLAT,))
        said = announced_again(info, channel.last)
        if said.tensors:
            channel.last = said
        if not channel.last.tensors:
            raise RefitRefusedError("no tensor is announced", field="names", value=[])
        module = one_module(info, self.context)
        chunks = _chunks(channel.last.tensors, channel.packed_bytes, flat=form == FLAT)
        return self._received(name, channel, list(chunks), module, loader)

    def shutdown(self, info: Mapping[str, Any]) -> None:
        """Leaves `group_name`; all groups if it is not given."""
        name = info.get("group_name")
        names = list(self._channels) if name is None else [name]
        if not names or names[0] not in self._channels:
            raise InvalidRequestError(
                "The group to be destroyed does not exist.",
                code="unknown_group",
                field="group_name",
                value=name,
                hint=f"Open: {sorted(self._channels)}.",
            )
        for known in names:
            self._channels.pop(known).group.close()

    def close(self) -> None:
        while self._channels:
            with contextlib.suppress(Exception):
                self._channels.popitem()[1].group.close()

    def _received(
        self, name: str, channel: Channel, chunks: list[list[Announced]], module: str | None, loader: Loader
    ) -> Iterator[WeightItem]:
        stream = _Stream(channel.group, chunks, module, reuse=loader is as_is)
        try:
            if loader is as_is:
                yield from stream.items()
            else:
                named = ((item.name, item.tensor) for item in stream.items())
                yield from items(module, loader(named), field="names")
                stream.drain()  # what the loader did not ask for
        except BroadcastError as error:
            self._channels.pop(name, None)
            channel.group.close()
            raise RefitRefusedError(
                f"Failed to receive weights: {error} (group {name!r})",
                code="broadcast_failed",
                field="group_name",
                value=name,
                hint="The group is closed. Init it again, and send all weights again.",
            ) from error
        except BaseException:  # refused in the middle: the others are still on their way
            self._drain(name, channel, stream)
            raise
        finally:
            if self.context.device.type == "cuda":
                torch.cuda.synchronize(self.context.device)

    def _drain(self, name: str, channel: Channel, stream: _Stream) -> None:
        """Takes what the trainer sends on, so that its next update finds the group in step. If that can't be, it is
        closed."""
        with contextlib.suppress(BroadcastError):
            stream.drain()
        if not stream.at_end:
            self._channels.pop(name, None)
            channel.group.close()

    def _meeting(self, info: Mapping[str, Any]) -> Meeting:
        context = self.context
        name, address = info.get("group_name") or GROUP, info.get("master_address")
        if not isinstance(address, str) or not address:
            raise RefitRefusedError(
                "not an address", field="master_address", value=address, hint="Bare NCCL ids are not supported."
            )
        port = _integer(info.get("master_port"), "master_port", 1, 65535)
        size = _integer(info.get("world_size"), "world_size", 2, 1 << 20)
        offset = _integer(info.get("rank_offset"), "rank_offset", 1, size - 1)
        if offset + context.world_size > size:
            raise RefitRefusedError(
                f"{context.world_size} ranks from rank {offset} on don't fit into a world of {size}",
                field="world_size",
                value=size,
                hint="It counts the trainer and all ranks of all engines.",
            )
        backend = info.get("backend") or ("nccl" if context.device.type == "cuda" else "gloo")
        if backend not in BACKENDS or (backend == "nccl" and context.device.type != "cuda"):
            raise RefitRefusedError(
                f"not a backend for {context.device}", field="backend", value=backend, hint="Known: nccl, gloo (CPU)."
            )
        if not isinstance(name, str) or name in self._channels:
            raise ConflictError(
                f"group {name!r} is open already", field="group_name", value=name, hint="destroy it first."
            )
        return Meeting(address, port, offset + context.rank, size, name, backend, context.timeout_s)

    def _packed(self, info: Mapping[str, Any]) -> int | None:
        if not info.get("packed"):
            return None
        return _integer(info.get("packed_buffer_size_bytes", PACKED_BYTES), "packed_buffer_size_bytes", 1, 1 << 50)


class Sized(Protocol):
    """A tensor, or what is known of one."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)
Chunk: TypeAlias = list[S]
"""Tensors that share a broadcast."""
Load: TypeAlias = list[Chunk[S]]
"""Broadcasts that are on their way together, and whose tensors are applied together."""


def _chunks(tensors: Iterable[S], packed_bytes: int | None, *, flat: bool) -> Iterator[Chunk[S]]:
    """Both sides cut alike: a packed chunk ends when it exceeds the buffer's size."""
    over = math.inf if flat else -1 if packed_bytes is None else packed_bytes
    return grouped(tensors, lambda tensor: tensor.nbytes, over=over)


def _loads(chunks: Iterable[Chunk[S]]) -> Iterator[Load[S]]:
    return grouped(chunks, _nbytes, over=LOAD_BYTES - 1, most=LOAD_BROADCASTS)


def _nbytes(tensors: Iterable[Sized]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class _Coming:
    """A load that is on its way: its chunks, where the bytes of each will be, and the broadcasts."""

    chunks: Load[Announced]
    flats: list[torch.Tensor]
    works: list[Any]


class _Stream:
    """What one call brings, load by load. While the tensors of one are being taken, the next is coming: a load's buffer
    is given to the one after the next as soon as its last tensor has been taken."""

    def __init__(
        self, group: BroadcastGroup, chunks: Sequence[Chunk[Announced]], module: str | None, *, reuse: bool
    ) -> None:
        """reuse: whether tensors are done with when the next load's are asked for; if not, each load has a buffer of
        its own."""
        self._group = group
        self._module = module
        loads = list(_loads(chunks))
        self._sizes = [sum(_aligned(_nbytes(chunk)) for chunk in load) for load in loads]
        self._rooms = Rooms(group.device, max(self._sizes)) if reuse else None
        self._left = len(loads)
        self._arrivals = self._arrive(loads)

    @property
    def at_end(self) -> bool:
        """Whether the group is where the trainer is after the call."""
        return self._left == 0

    def items(self) -> Iterator[WeightItem]:
        for load in self._arrivals:
            left = sum(len(chunk) for chunk in load.chunks)
            for chunk, flat in zip(load.chunks, load.flats, strict=True):
                for tensor, part in zip(chunk, flat.split([tensor.nbytes for tensor in chunk]), strict=True):
                    value = check_booleans(of_bytes(part, tensor.dtype, tensor.shape), name=tensor.name)
                    left -= 1
                    yield WeightItem(self._module, tensor.name, value, more=left > 0)

    def drain(self) -> None:
        for _ in self._arrivals:
            pass

    def _arrive(self, loads: Sequence[Load[Announced]]) -> Iterator[_Coming]:
        coming: deque[_Coming] = deque()
        for load, nbytes in zip(loads, self._sizes, strict=True):
            coming.append(self._begin(load, nbytes))
            if len(coming) == AHEAD:
                yield self._finished(coming.popleft())
        while coming:
            yield self._finished(coming.popleft())

    def _begin(self, load: Load[Announced], nbytes: int) -> _Coming:
        room, start = self._room(nbytes), 0
        flats = []
        for chunk in load:
            flats.append(room[start : start + _nbytes(chunk)])
            start += _aligned(flats[-1].numel())
        return _Coming(load, flats, [self._group.begin(flat) for flat in flats])

    def _room(self, nbytes: int) -> torch.Tensor:
        rooms = self._rooms or Rooms(self._group.device)
        try:
            return rooms.take(nbytes)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise RefitRefusedError(
                f"there is no room for {nbytes} bytes that come together: {_first_line(error)}",
                code="no_room",
                field="shapes",
                value=nbytes,
                hint="Send smaller buckets. The group is closed: init it again.",
            ) from error

    def _finished(self, load: _Coming) -> _Coming:
        for work in load.works:
            self._group.finish(work)
        self._left -= 1
        return load


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _integer(value: object, field_name: str, low: int, high: int) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
        raise RefitRefusedError(f"not an integer from {low} to {high}", field=field_name, value=value)
    return number


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class WeightSender:
    """The trainer's side: rank 0 of a group, which engines join meanwhile.

    sender = WeightSender("10.0.0.1", world_size=1 + engine_ranks)
    # in a thread: client.init_weights_update_group(**sender.init_info(rank_offset=1))
    sender.join()
    # in a thread: client.update_weights_from_distributed(**sender.announce(named))
    sender.send(named)
    """

    def __init__(
        self,
        master_address: str,
        master_port: int = 0,
        *,
        world_size: int,
        group_name: str = GROUP,
        backend: str = "nccl",
        device: torch.device | str | None = None,
        packed_bytes: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Listens at that address, which the engines' hosts must reach; port 0 is a free one. `device`: the CUDA device
        that NCCL sends from. `packed_bytes`: send vLLM's packed form, with buffers of this size."""
        self._store: TCPStore | None = listening_store(master_address, master_port, world_size, timeout_s=timeout_s)
        self._meeting = Meeting(master_address, self._store.port, 0, world_size, group_name, backend, timeout_s)
        self._device = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
        self._packed_bytes = packed_bytes
        self._group: BroadcastGroup | None = None

    def init_info(self, rank_offset: int = 1) -> dict[str, Any]:
        """What an engine has to be told, whose rank 0 is the group's `rank_offset`."""
        where = self._meeting
        packed = {"packed": True, "packed_buffer_size_bytes": self._packed_bytes} if self._packed_bytes else {}
        return {
            "master_address": where.address,
            "master_port": where.port,
            "rank_offset": rank_offset,
            "world_size": where.world_size,
            "group_name": where.name,
            "backend": where.backend,
            **packed,
        }

    def join(self) -> None:
        """Returns when all ranks have joined.

        Raises:
            RuntimeError: they didn't in time.
        """
        self._group = BroadcastGroup(self._meeting, self._device, self._store)

    def announce(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, load_format: str | None = None
    ) -> dict[str, Any]:
        """What the update call has to say about these tensors, before or while they are sent."""
        kept = list(named_tensors)
        return {
            "names": [name for name, _ in kept],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in kept],
            "shapes": [list(t.shape) for _, t in kept],
            "group_name": self._meeting.name,
            **({"load_format": load_format} if load_format else {}),
        }

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, load_format: str | None = None) -> None:
        """Broadcasts the tensors in order, as they were announced. Returns when they are sent.

        Raises:
            BroadcastError: an engine is gone, or did not receive in time. Close the sender, and make another.
        """
        if self._group is None:
            raise BroadcastError("join the group first")
        going: deque[list[_Going]] = deque()  # while the next load is put together
        rooms = Rooms(self._group.device)
        for load in _loads(_chunks((t for _, t in named_tensors), self._packed_bytes, flat=load_format == FLAT)):
            if len(going) == AHEAD:
                _finish(self._group, going.popleft())
            going.append(_begin(self._group, load, rooms))
        while going:
            _finish(self._group, going.popleft())

    def close(self) -> None:
        """Leaves the group and stops listening."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None


class _Going(NamedTuple):
    """The bytes of a broadcast, which nobody touches until it has ended, and what is for `finish`."""

    flat: torch.Tensor
    work: Any


def _begin(group: BroadcastGroup, load: Load[torch.Tensor], rooms: Rooms) -> list[_Going]:
    """Sends each chunk: a tensor alone from where it lies, if it may, and several from a room."""
    room, start = rooms.take(sum(_aligned(_nbytes(chunk)) for chunk in load if len(chunk) > 1)), 0
    going = []
    for chunk in load:
        parts = [as_bytes(tensor).to(group.device) for tensor in chunk]
        flat = parts[0]
        if len(parts) > 1:
            flat = torch.cat(parts, out=room[start : start + _nbytes(parts)])
            start += _aligned(flat.numel())
        going.append(_Going(flat, group.begin(flat)))
    return going


def _finish(group: BroadcastGroup, load: list[_Going]) -> None:
    for one in load:
        group.finish(one.work)
