"""Weights through memory that two processes of one host share: no bytes in a request, no pickle.

A sender has one buffer of two halves. It fills one while the engine reads the other; each call says what lies where.
The buffer is CUDA memory (CUDA IPC), or on a CPU an anonymous file in memory that has no name anywhere: whatever dies,
nothing is left behind. It is sealed against shrinking, so a sender that cuts it can't kill its reader. vLLM's form,
CUDA IPC handles in the call, is read too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from engine_control.closing import Closing
from engine_control.errors import InvalidRequestError, RefitRefusedError
from engine_control.refit.backends._calls import (
    Announced,
    Loader,
    NamedTensors,
    announced_tensors,
    as_is,
    items,
    load_format,
    of_rank,
    one_module,
    refuse_modes,
)
from engine_control.refit.backends.base import TransportContext, WeightItem, WeightTransport
from engine_control.refit.payload.devices import device_uuid, plain_uuid, release_imports
from engine_control.refit.payload.layout import as_bytes, byte_count, check_booleans, dtype_named, piece, shape_of
from engine_control.refit.payload.rebuild import load_payload
from engine_control.refit.payload.serializer import pickle_from
from engine_control.refit.shared_buffers import (
    FIELD,
    CudaBuffer,
    HostBuffer,
    open_buffer,
    open_cuda,
    refuse_cpu,
    token_of,
)

ALIGNMENT = 256  # bytes, of each tensor in a buffer
CALLS = 256  # of which the places are remembered
Placed = tuple[str | None, str, torch.Tensor]
"""A module, a name, and where the tensor lies."""
HANDLES, PICKLED = "ipc_handles", "ipc_handles_pickled"


class IpcTransport(WeightTransport):
    """`info`: `buffer`, a sender's handle, and `tensors`, a list of {module, name, dtype, shape, offset in bytes}. Or
    vLLM's: names, dtype_names, shapes and `ipc_handles`, with `tensor_sizes` if they share one buffer.

    A buffer stays mapped until another one comes, or `shutdown`.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._mapped: tuple[object, torch.Tensor] | None = None
        self._said: deque[tuple[object, list[Placed]]] = deque(maxlen=CALLS)  # in calls, and their views of that buffer
        self._open = False

    def init(self, info: Mapping[str, Any]) -> None:
        """There is nothing to open before the first buffer; vLLM's trainers call it."""
        self._open = True

    def receive(self, info: Mapping[str, Any]) -> Iterator[WeightItem]:
        refuse_modes(info)
        info = of_rank(info, self.context)
        _, loader = load_format(info, self.context, ())
        if info.get(HANDLES) is not None or info.get(PICKLED) is not None:
            refuse_cpu(self.context.device)
            return self._by_handle(info, loader)
        said = (token_of(info.get(FIELD)), info.get("tensors"), info.get("target_modules"))
        known = next((views for before, views in self._said if before == said), None)
        if known is not None:  # a sender of fixed places says the same in each refit
            return self._of_views(known, loader)
        places = [self._place(entry, info) for entry in _entries(said[1])]
        return self._from_buffer(said, info[FIELD], places, loader)

    def shutdown(self, info: Mapping[str, Any]) -> None:
        """Unmaps the sender's buffer."""
        if self._mapped is None and not self._open:
            raise InvalidRequestError("no buffer is mapped", hint="It is mapped by the first update call.")
        self.close()
        release_imports(self.context.device)

    def close(self) -> None:
        self._mapped, self._open = None, False
        self._said.clear()

    def _from_buffer(
        self,
        said: tuple[str, object, object],
        handle: Mapping[str, Any],
        places: list[tuple[str | None, Announced, int]],
        loader: Loader,
    ) -> Iterator[WeightItem]:
        buffer = self._buffer(said[0], lambda: open_buffer(handle, self.context.rank, self.context.device))
        for _, tensor, offset in places:
            _check_inside(buffer, tensor, offset)
        views = [(module, t.name, piece(buffer, offset, t.dtype, t.shape)) for module, t, offset in places]
        aligned = all(offset % t.dtype.itemsize == 0 for _, t, offset in places)
        if aligned:  # the others are copies
            self._said.append((said, views))
        yield from self._of_views(views, loader)

    def _of_views(self, views: list[Placed], loader: Loader) -> Iterator[WeightItem]:
        try:
            for module, placed in groupby(views, key=itemgetter(0)):
                named = ((name, check_booleans(view, name=name)) for _, name, view in placed)
                yield from items(module, loader(named), field="tensors", more=loader is as_is)
        finally:
            if self.context.device.type == "cuda":  # the sender may fill it again
                torch.cuda.synchronize(self.context.device)

    def _buffer(self, key: object, opened: Any) -> torch.Tensor:
        """The mapped buffer, which is opened once: torch pairs each export of CUDA memory with one import."""
        if self._mapped is None or self._mapped[0] != key:
            self._mapped = None
            self._said.clear()
            release_imports(self.context.device)
            self._mapped = (key, opened())
        return self._mapped[1]

    def _place(self, entry: object, info: Mapping[str, Any]) -> tuple[str | None, Announced, int]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or not entry["name"]:
            raise RefitRefusedError("a tensor without a name", field="tensors", value=type(entry).__name__)
        name, module = entry["name"], entry.get("module")
        if module is not None and module not in self.context.weights:
            raise RefitRefusedError(f"there is no module {module!r}", code="unknown_module", field=name, value=module)
        offset = entry.get("offset")
        if type(offset) is not int or offset < 0:
            raise RefitRefusedError("not an offset in bytes", field=name, value=offset)
        tensor = Announced(name, dtype_named(entry.get("dtype"), field=name), shape_of(entry.get("shape"), field=name))
        return module if module is not None else one_module(info, self.context), tensor, offset

    def _by_handle(self, info: Mapping[str, Any], loader: Loader) -> Iterator[WeightItem]:
        announced, module = announced_tensors(info), one_module(info, self.context)
        handles = info.get(HANDLES)
        if handles is None:
            handles = load_payload(pickle_from(info[PICKLED], field=PICKLED))
        try:
            packed = isinstance(handles, Mapping)
            named = self._packed(handles, announced, info) if packed else self._single(handles, announced)
            yield from items(module, loader(named), field=HANDLES, more=loader is as_is)
        finally:
            release_imports(self.context.device)

    def _single(self, handles: object, announced: list[Announced]) -> NamedTensors:
        if not isinstance(handles, Sequence) or isinstance(handles, str) or len(handles) != len(announced):
            raise RefitRefusedError(
                f"not a handle for each of {len(announced)} tensors", field=HANDLES, hint="List one object for each."
            )
        own = self._own()
        kept: dict[str, torch.Tensor] = {}  # one tensor of each memory, which stays mapped until all have been read
        for tensor, by_gpu in zip(announced, handles, strict=True):
            arguments = self._of_gpu(by_gpu, own)
            opened = open_cuda(arguments)
            kept.setdefault(str(arguments[7]), opened)
            if opened.dtype != tensor.dtype or tuple(opened.shape) != tensor.shape:
                raise RefitRefusedError(
                    f"a tensor {list(opened.shape)} of {opened.dtype} came, announced was {list(tensor.shape)} of "
                    f"{tensor.dtype}",
                    field=tensor.name,
                )
            yield tensor.name, opened

    def _packed(self, handles: Mapping[str, Any], announced: list[Announced], info: Mapping[str, Any]) -> NamedTensors:
        sizes = info.get("tensor_sizes")
        if sizes is not None and list(sizes) != [tensor.nbytes for tensor in announced]:
            raise RefitRefusedError("not the bytes of the tensors", field="tensor_sizes", value=sizes)
        arguments = self._of_gpu(handles, self._own())
        key = (str(arguments[7]), arguments[9])
        buffer = as_bytes(self._buffer(key, lambda: open_cuda(arguments)))
        start = 0
        for tensor in announced:
            _check_inside(buffer, tensor, start)
            yield tensor.name, check_booleans(piece(buffer, start, tensor.dtype, tensor.shape), name=tensor.name)
            start += tensor.nbytes

    def _own(self) -> tuple[str | None, int]:
        """This rank's GPU: its UUID, and the index that it has in this process."""
        device = self.context.device
        return device_uuid(device), torch.cuda.current_device() if device.index is None else device.index

    def _of_gpu(self, by_gpu: object, gpu: tuple[str | None, int]) -> Sequence[Any]:
        """The handle's arguments for this rank's GPU, on the device as this process knows it."""
        own, index = gpu
        if not isinstance(by_gpu, Mapping):
            raise RefitRefusedError("not handles by GPU", field=HANDLES, hint="Send {gpu_uuid: arguments}.")
        found = {plain_uuid(uuid): arguments for uuid, arguments in by_gpu.items()}
        if own not in found:
            raise RefitRefusedError(
                f"no handle is of this rank's device {own}",
                field=HANDLES,
                value=", ".join(found),
                hint="Same GPU only.",
            )
        arguments = found[own]
        if isinstance(arguments, str) or not isinstance(arguments, Sequence) or len(arguments) != 15:
            raise RefitRefusedError("not the 15 arguments of a CUDA IPC handle", field=HANDLES)
        return [*arguments[:6], index, *arguments[7:]]


def _entries(tensors: object) -> Sequence[Any]:
    if not isinstance(tensors, Sequence) or isinstance(tensors, str) or not tensors:
        raise RefitRefusedError("not a list of tensors", field="tensors", hint="Say what lies where in the buffer.")
    return tensors


def _check_inside(buffer: torch.Tensor, tensor: Announced, offset: int) -> None:
    if offset + tensor.nbytes > buffer.numel():
        raise RefitRefusedError(
            f"bytes {offset} to {offset + tensor.nbytes} of a buffer of {buffer.numel()}",
            field=tensor.name,
            value=offset,
        )


class IpcSender(Closing):
    """The trainer's side, for one engine on the same host.

    with IpcSender(half_bytes=1 << 30) as sender:
        for info in sender.batches(named_tensors):
            client.update_weights_from_ipc(**info, target_modules=["transformer"])
    """

    def __init__(self, half_bytes: int = 256 << 20, *, device: torch.device | str = "cpu", receivers: int = 1) -> None:
        """half_bytes: of each half; at least as large as the largest tensor. receivers: the engine's ranks."""
        self._half = -(-half_bytes // ALIGNMENT) * ALIGNMENT
        place = torch.device(device)
        cuda = place.type == "cuda"
        self._buffer = CudaBuffer(2 * self._half, place, receivers) if cuda else HostBuffer(2 * self._half)
        self._device = place

    def batches(self, named_tensors: NamedTensors, *, module: str | None = None) -> Iterator[dict[str, Any]]:
        """The fields of one update call after the other; all have come when the last has been answered. Ask for the
        next when the engine has answered: while it reads, the next half is being filled (on a CPU by a thread, which
        also takes the tensors out of `named_tensors`).

        Raises:
            ValueError: a tensor is larger than a half.
        """
        filling = self._fillings(iter(named_tensors), module)
        if self._device.type == "cuda":
            yield from self._ahead_on_device(filling)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="ipc-sender") as pool:
            coming = pool.submit(next, filling, None)
            while (info := coming.result()) is not None:
                coming = pool.submit(next, filling, None)
                yield info

    def close(self) -> None:
        """Gives the buffer back."""
        self._buffer.close()

    def _ahead_on_device(self, filling: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The copies of the next half are launched before this one is handed out, and have ended before the next is."""
        stream = torch.cuda.current_stream(self._device)
        info = next(filling, None)
        while info is not None:
            stream.synchronize()
            ready, info = info, next(filling, None)
            yield ready

    def _fillings(self, named: Iterator[tuple[str, torch.Tensor]], module: str | None) -> Iterator[dict[str, Any]]:
        """Fills the halves by turns; what it says of one is true when the copies are done."""
        begin, position = 0, 0
        tensors: list[dict[str, Any]] = []
        for name, tensor in named:
            count = byte_count(tensor.shape, tensor.dtype)
            if count > self._half:
                raise ValueError(f"{name!r} has {count} bytes, more than half_bytes={self._half}")
            if position + count > self._half and tensors:
                yield {FIELD: self._buffer.handle, "tensors": tensors}
                begin, position, tensors = self._half - begin, 0, []
            start = begin + position
            self._buffer.bytes[start : start + count].copy_(as_bytes(tensor))
            entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            tensors.append({"module": module, **entry, "offset": start})
            position += -(-count // ALIGNMENT) * ALIGNMENT
        if tensors:
            yield {FIELD: self._buffer.handle, "tensors": tensors}
