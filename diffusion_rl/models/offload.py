"""Layerwise offload: a transformer's blocks lie in host memory, and are on the device only while they compute.

Blocks are taken in groups. A group's weights lie end to end in one piece of pinned host memory, which is where they
belong: whoever reads or writes weights does it there. Two slots of device memory, each as large as the largest group,
take turns: while a group computes in one, the next is copied into the other, by a stream of its own. Nothing is copied
back, since a forward changes no weight. Between two forwards all blocks lie in host memory, and only there. Everything
outside of the blocks stays on the device.

The blocks run their own forwards (or the fused ones) on the same bytes, so that no bit of an output depends on it.
diffusers' group offloading was not taken: its hooks replace the blocks' forwards, which keeps the fused ones out and so
gives other bits; it carries what is outside of the blocks up and down at each forward; and what it has on the device
grows as the host runs ahead of it.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from diffusion_rl.batch import FIRST, SECOND
from engine_control.errors import ConflictError, InvalidRequestError
from engine_control.memory.backup import host_slab, unpin

logger = logging.getLogger(__name__)

OFFLOADED = (FIRST, SECOND)
"""The components of a pipeline whose blocks are offloaded."""
SLOTS = 2
ALIGNMENT = 512  # bytes, of each weight; kernels take their fast ways from 16 on
ATTRIBUTE = "layerwise_offload"  # of a transformer whose blocks are offloaded


@dataclass(eq=False)
class _Slot:
    """Device memory for one group at a time. free: all that computed with the group before is done. loaded: the copy
    into it is done. On a CPU there is nothing to wait for."""

    group: _Group | None = None
    memory: torch.Tensor | None = None
    free: torch.cuda.Event | None = None
    loaded: torch.cuda.Event | None = None


@dataclass(eq=False)
class _Group:
    """Consecutive blocks: their own parameters and buffers, where each begins in the group's memory, that memory on the
    host, and views of it on the host and in the slots."""

    blocks: Sequence[torch.nn.Module]
    tensors: Sequence[torch.Tensor]
    offsets: Sequence[int]
    host: torch.Tensor
    host_views: Sequence[torch.Tensor]
    slot: _Slot | None = None
    slot_views: dict[_Slot, Sequence[torch.Tensor]] = field(default_factory=dict)

    def views_of(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """The weights as they lie in `memory`, with shapes and strides."""
        return [_view(memory, offset, tensor) for tensor, offset in zip(self.tensors, self.offsets, strict=True)]

    def lie_in(self, views: Sequence[torch.Tensor]) -> None:
        """Afterwards the modules' tensors are those views; the tensor objects stay."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view


class _Hook:
    """A hook that ignores what it is called with. A copy of its module is an ordinary one, so a copy does nothing."""

    def __init__(self, function: Callable[[], None] | None) -> None:
        self._function = function

    def __call__(self, *_: object) -> None:
        if self._function is not None:
            self._function()

    def __deepcopy__(self, memo: object) -> _Hook:
        return _Hook(None)


class LayerwiseOffload:
    """Keeps one transformer's blocks in host memory. The engine's thread alone runs that transformer.

    A deep copy of the transformer is an ordinary module, whose blocks lie in host memory until it is moved.
    """

    def __init__(self, transformer: torch.nn.Module, device: torch.device, *, group_size: int = 1) -> None:
        """Afterwards the blocks' weights lie in host memory and all others on `device`, wherever they were. Blocks are
        the elements of the lists that are the transformer's direct children; `group_size` of a list come together.

        Raises:
            InvalidRequestError: it has no such blocks, or `group_size` is less than 1. Nothing was moved.
            InsufficientMemoryError: the host has no room. Some blocks were moved by then: load the model anew.
        """
        check_group_size(group_size)
        self.device = device
        self.group_size = group_size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._locked: list[torch.Tensor] = []
        self._unsettled = False
        self._groups = [group for blocks in _block_groups(transformer, group_size) if (group := self._group(blocks))]
        if not self._groups:
            raise InvalidRequestError(
                f"a {type(transformer).__name__} has no list of blocks that could be offloaded",
                field="dit_layerwise_offload",
                value=True,
                hint="Leave it out.",
            )
        self._slots = [_Slot() for _ in range(min(SLOTS, len(self._groups)))]
        self._largest = max(len(group.host) for group in self._groups)
        self._ids = {id(tensor) for group in self._groups for tensor in group.tensors}
        for tensor in (*transformer.parameters(), *transformer.buffers()):
            if not self.holds(tensor):
                tensor.data = tensor.data.to(device)
        for group, following in zip(self._groups, [*self._groups[1:], None], strict=True):
            for block in group.blocks:
                block.register_forward_pre_hook(_Hook(partial(self._enter, group, following)))
            group.blocks[-1].register_forward_hook(_Hook(partial(self._leave, group)))
        transformer.register_forward_hook(_Hook(self._leave_all), always_call=True)
        setattr(transformer, ATTRIBUTE, self)
        if self._locked:  # CUDA would go on to take the addresses for locked when the memory is freed
            weakref.finalize(self, unpin, self._locked).atexit = False

    def __deepcopy__(self, memo: object) -> None:
        return None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the offloaded parameters and buffers."""
        return id(tensor) in self._ids

    def settle(self) -> None:
        """Afterwards each offloaded weight lies in host memory alone, and nothing reads it: it may be read and written
        there. Whatever an interrupted forward has left on the device is forgotten."""
        if not self._unsettled:
            return
        if self._stream is not None:
            self._stream.synchronize()
        self._leave_all()
        self._unsettled = False

    def give_device_memory_back(self) -> None:
        """Settles, and lets the slots' memory go; the next forward takes it again."""
        self.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for slot in self._slots:
            slot.memory = None
        for group in self._groups:
            group.slot_views.clear()

    def describe(self) -> dict[str, Any]:
        """For `/server_info`: groups and their size in blocks, bytes of host memory, and of the slots on the device."""
        return {
            "groups": len(self._groups),
            "group_size": self.group_size,
            "host_bytes": sum(len(group.host) for group in self._groups),
            "device_bytes": self._largest * len(self._slots),
            "pinned": len(self._locked) == len(self._groups),
        }

    def _group(self, blocks: Sequence[tuple[torch.nn.Module, Sequence[torch.Tensor]]]) -> _Group | None:
        """Those blocks with their tensors, moved into host memory of the group; None if there are none."""
        tensors = [tensor for _, own in blocks for tensor in own]
        if not tensors:
            return None
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        host, pinned = host_slab(size, pinned=self._stream is not None, what="layerwise offload")
        if pinned:
            self._locked.append(host)
        group = _Group([block for block, _ in blocks], tensors, offsets, host, [])
        group.host_views = group.views_of(host)
        for view, tensor in zip(group.host_views, tensors, strict=True):
            view.copy_(tensor.data)
        group.lie_in(group.host_views)
        return group

    def _enter(self, group: _Group, following: _Group | None) -> None:
        if group.slot is None:
            self._load(group, keep=None)
        assert group.slot is not None
        if group.slot.loaded is not None:
            torch.cuda.current_stream(self.device).wait_event(group.slot.loaded)
        if following is not None and following.slot is None:
            self._load(following, keep=group)

    def _leave(self, group: _Group) -> None:
        """Its weights lie in host memory again; its slot is free once all that was launched by now is done."""
        slot = group.slot
        if slot is None:
            return
        group.lie_in(group.host_views)
        if slot.free is not None:
            slot.free.record(torch.cuda.current_stream(self.device))
        group.slot = slot.group = None

    def _leave_all(self) -> None:
        """Also after a forward that failed, or that left blocks out."""
        for slot in self._slots:
            if slot.group is not None:
                self._leave(slot.group)

    @torch.no_grad()
    def _load(self, group: _Group, *, keep: _Group | None) -> None:
        """Has the group copied into a slot in which `keep` isn't. On a GPU the copy may still run afterwards."""
        slot = next((s for s in self._slots if s.group is None), None)
        if slot is None:  # the groups came in another order than they stand in
            slot = next(s for s in self._slots if s.group is not keep)
            assert slot.group is not None
            self._leave(slot.group)
        self._unsettled = True
        memory = self._memory(slot)
        if self._stream is None:
            memory[: len(group.host)].copy_(group.host)
        else:
            assert slot.free is not None
            assert slot.loaded is not None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.free)
                memory[: len(group.host)].copy_(group.host, non_blocking=True)
                slot.loaded.record(self._stream)
        if slot not in group.slot_views:
            group.slot_views[slot] = group.views_of(memory)
        group.lie_in(group.slot_views[slot])
        group.slot, slot.group = slot, group

    def _memory(self, slot: _Slot) -> torch.Tensor:
        if slot.memory is None:
            slot.memory = torch.empty(self._largest, dtype=torch.uint8, device=self.device)
            if self._stream is not None:
                slot.free, slot.loaded = torch.cuda.Event(), torch.cuda.Event()
                slot.free.record(torch.cuda.current_stream(self.device))  # what had that memory before is done then
        return slot.memory


def offload_of(module: torch.nn.Module) -> LayerwiseOffload | None:
    """The offload that keeps this transformer's blocks, if there is one."""
    found = vars(module).get(ATTRIBUTE)
    return found if isinstance(found, LayerwiseOffload) else None


def describe_offloads(transformers: Iterable[torch.nn.Module]) -> dict[str, object] | None:
    """For `/server_info`: all of a pipeline's offloads together; None if there are none."""
    found = [offload.describe() for module in transformers if (offload := offload_of(module)) is not None]
    if not found:
        return None
    summed = {name: sum(one[name] for one in found) for name in ("groups", "host_bytes", "device_bytes")}
    return {**found[0], **summed, "pinned": all(one["pinned"] for one in found)}


def device_of_module(module: torch.nn.Module) -> torch.device:
    """Where the module computes."""
    offload = offload_of(module)
    return next(module.parameters()).device if offload is None else offload.device


def offload_pipeline(pipeline: Any, device: torch.device | str, *, group_size: int) -> None:
    """Afterwards the pipeline computes on `device`, and the blocks of its transformers lie in host memory. They never
    were on the device together, if they weren't before."""
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place.type == "cpu":
        logger.warning("layerwise offload saves nothing on a CPU, and copies every weight at each forward")
    for name, module in pipeline.components.items():
        if not isinstance(module, torch.nn.Module):
            continue
        if name not in OFFLOADED:
            module.to(place)
        elif offload_of(module) is None:
            LayerwiseOffload(module, place, group_size=group_size)


def refuse_offloaded(pipeline: Any) -> None:
    """Refuses a pipeline whose blocks another engine has offloaded, for an engine that doesn't expect it."""
    for name in OFFLOADED:
        module = getattr(pipeline, name, None)
        if isinstance(module, torch.nn.Module) and offload_of(module) is not None:
            raise ConflictError(
                f"the blocks of this pipeline's {name} were offloaded by another engine",
                code="offloaded",
                field="dit_layerwise_offload",
                value=False,
                hint="Use dit_layerwise_offload=True here too, or load another pipeline.",
            )


def refuse_combinations(*, torch_compile: bool, tp_size: int) -> None:
    """Refuses to offload what something else has to find where it lay.

    Raises:
        InvalidRequestError: the transformer is compiled, or its weights are shared by several ranks.
    """
    if torch_compile:
        raise InvalidRequestError(
            "a compiled transformer can't be offloaded layer by layer: its graph reads weights where they lay when it "
            "was made",
            field="dit_layerwise_offload",
            value=True,
            hint="Leave out --dit-layerwise-offload or --enable-torch-compile.",
        )
    if tp_size > 1:
        raise InvalidRequestError(
            f"weights that {tp_size} ranks share can't be offloaded layer by layer as well",
            field="dit_layerwise_offload",
            value=True,
            hint="Leave out --dit-layerwise-offload or --tp-size; --sp-degree goes with it.",
        )


def refuse_offloaded_gradients(module: torch.nn.Module) -> None:
    """Refuses a forward whose backward would look for weights that are gone from the device by then.

    Raises:
        InvalidRequestError: gradients are recorded, and the module's blocks are offloaded.
    """
    if torch.is_grad_enabled() and offload_of(module) is not None:
        raise InvalidRequestError(
            "no gradients flow through a transformer whose blocks are offloaded",
            code="offloaded",
            field="dit_layerwise_offload",
            value=True,
            hint="Give replay the trainer's own transformer, or score under torch.no_grad().",
        )


def check_group_size(group_size: int) -> None:
    """
    Raises:
        InvalidRequestError: fewer than one block.
    """
    if group_size < 1:
        raise InvalidRequestError(
            "must be at least 1", field="dit_offload_group_size", value=group_size, hint="1 takes the least memory."
        )


def _block_groups(
    transformer: torch.nn.Module, group_size: int
) -> Iterator[Sequence[tuple[torch.nn.Module, Sequence[torch.Tensor]]]]:
    """`group_size` consecutive blocks of a list each time, and of each block the tensors that are its alone."""
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList) and len(child)]
    uses = Counter(tensor.data_ptr() for _, tensor in _all_tensors(transformer))
    for blocks in lists:
        owned = [
            (block, [t for _, t in _all_tensors(block) if _can_move(t) and uses[t.data_ptr()] == 1]) for block in blocks
        ]
        for start in range(0, len(owned), group_size):
            yield owned[start : start + group_size]


def _all_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, a tied one under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _can_move(tensor: torch.Tensor) -> bool:
    return (
        type(tensor.data) is torch.Tensor and tensor.layout == torch.strided and tensor.nbytes > 0 and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory without gaps and without lying on each other."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _view(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    placed = torch.empty(0, dtype=like.dtype, device=memory.device)
    start = memory.storage_offset() + offset
    return placed.set_(memory.untyped_storage(), start // like.element_size(), like.size(), like.stride())
