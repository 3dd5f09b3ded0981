"""The globals that a weight payload may name, and what each stands for here.

A pickle of `torch.multiprocessing` holds no bytes of a tensor but the way to memory that both processes can map: CUDA
IPC handles, or POSIX shared memory by name (torch's sharing strategy `file_system`). Each handle is checked before
torch opens it, and the tensor's shape against the size of its memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from engine_control.errors import RefitRefusedError
from engine_control.refit.payload.devices import local_index
from engine_control.refit.payload.layout import DTYPE_BY_NAME, shape_of
from engine_control.refit.payload.unpickler import FIELD, Globals, HolderClass, Marker, Rebuilder, load

SHARED_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
MANAGER_PATH = re.compile(rb"/[^\x00]{1,80}/torch-shm-dir-[A-Za-z0-9]+/manager\.sock")
SHARED_HEADER_BYTES = 64  # torch keeps a reference count before the data
SHARED_FOLDER = "/dev/shm"

BUCKET_MODULE = "sglang.srt.weight_sync.tensor_bucket"
SERIALIZED_MODULES = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
)
SERIALIZED_TENSOR = "LocalSerializedTensor"


def load_payload(data: bytes | bytearray) -> Any:
    """The object of one entry of `serialized_named_tensors`, its tensors mapped from the sender's memory.

    Raises:
        RefitRefusedError: naming what a payload may not contain, or which handle can't be opened.
    """
    return load(data, _table())


class _SharedMemory:
    """Storages of one reading that lie in named shared memory. Of one name torch must map one storage."""

    def __init__(self) -> None:
        self._opened: dict[bytes, torch.UntypedStorage] = {}

    def rebuild(self, cls: object, manager: object, handle: object, size: object, dtype: object = None) -> object:
        """Maps the memory, and tells its sender (through torch's reference count) that it has arrived."""
        if not isinstance(manager, bytes) or not MANAGER_PATH.fullmatch(manager):
            raise RefitRefusedError("not a torch shared-memory manager", field=FIELD, value=manager)
        if not isinstance(handle, bytes) or not SHARED_NAME.fullmatch(handle):
            raise RefitRefusedError("not a name of torch's shared memory", field=FIELD, value=handle)
        if type(size) is not int or size < 0:
            raise RefitRefusedError("shared memory of no size", field=FIELD, value=size)
        nbytes = size * dtype.itemsize if isinstance(dtype, torch.dtype) else size
        storage = self._opened.get(handle)
        if storage is None:
            _check_shared(handle, nbytes)
            storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, nbytes)
            self._opened[handle] = storage
        elif storage.nbytes() != nbytes:
            raise RefitRefusedError("one shared memory with two sizes", field=FIELD, value=handle)
        storage._shared_decref()
        return storage


def _check_shared(handle: bytes, nbytes: int) -> None:
    try:
        found = os.stat(SHARED_FOLDER + handle.decode())
    except OSError as error:
        raise RefitRefusedError(
            "the shared memory is not there (any more)",
            field=FIELD,
            value=handle,
            hint="Send from the same host, keep the tensors until the reply has come, and send a payload once.",
        ) from error
    if found.st_uid != os.geteuid() or found.st_size < nbytes + SHARED_HEADER_BYTES:
        raise RefitRefusedError(
            f"the shared memory has {found.st_size} bytes of user {found.st_uid}, needed are {nbytes}",
            field=FIELD,
            value=handle,
        )


def _rebuild_typed_storage(storage: object, dtype: object) -> object:
    if not isinstance(storage, torch.UntypedStorage) or not isinstance(dtype, torch.dtype):
        raise TypeError("not a storage and its dtype")
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _rebuild_tensor(cls: object, storage: object, metadata: object) -> torch.Tensor:
    offset, size, stride, _requires_grad = _tuple(metadata, 4)
    return _view(storage, offset, size, stride)


def _rebuild_tensor_v2(storage: object, offset: object, size: object, stride: object, *_rest: object) -> torch.Tensor:
    return _view(storage, offset, size, stride)


def _rebuild_parameter(data: object, _requires_grad: object = False, _hooks: object = None) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise TypeError("not a tensor")
    return data


def _view(storage: object, offset: object, size: object, stride: object) -> torch.Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise TypeError("not a typed storage")
    shape = shape_of(size, field=FIELD)
    elements = storage._untyped_storage.nbytes() // storage.dtype.itemsize
    strides = _check_view(shape, stride, offset, elements)
    tensor: torch.Tensor = torch._utils._rebuild_tensor(storage, offset, shape, strides)
    return tensor.detach()


def rebuild_cuda_tensor(*arguments: object) -> torch.Tensor:
    """The tensor of a CUDA IPC handle, on the device of this process that it lies on.

    arguments: those of `torch.multiprocessing.reductions.rebuild_cuda_tensor`; the device (index 6) is the index that
    it has in this process, or its UUID. Classes are ignored: what comes is a plain tensor without a gradient.
    """
    if len(arguments) != 15:
        raise TypeError(f"{len(arguments)} arguments instead of 15")
    _, size, stride, offset, _, dtype, device, handle, size_bytes, offset_bytes, _, *reference = arguments
    shape = shape_of(size, field=FIELD)
    if not isinstance(dtype, torch.dtype) or type(size_bytes) is not int or size_bytes < 0:
        raise TypeError("not a dtype and the size of its storage")
    strides = _check_view(shape, stride, offset, size_bytes // dtype.itemsize)
    index = local_index(device, field=FIELD)
    if handle is not None and not (isinstance(handle, bytes) and type(offset_bytes) is int and offset_bytes >= 0):
        raise TypeError("not a CUDA IPC handle")
    rest = (handle, size_bytes, offset_bytes, False, *reference)
    cls, storage_cls = torch.Tensor, torch.storage.UntypedStorage
    if handle is None or size_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", index))
    tensor: torch.Tensor = reductions.rebuild_cuda_tensor(
        cls, torch.Size(shape), strides, offset, storage_cls, dtype, index, *rest
    )
    return tensor


def _check_view(shape: Sequence[int], stride: object, offset: object, elements: int) -> tuple[int, ...]:
    """The strides, if a tensor with them stays inside a storage of so many elements."""
    strides = shape_of(stride, field=FIELD)
    if len(strides) != len(shape) or type(offset) is not int or offset < 0:
        raise TypeError("not the strides and offset of that shape")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= elements:
        raise RefitRefusedError(
            f"a tensor {list(shape)} at {offset} with strides {list(strides)} leaves its memory of {elements} elements",
            field=FIELD,
        )
    return strides


def _size(values: object = ()) -> torch.Size:
    return torch.Size(shape_of(values, field=FIELD))


def _tuple(value: object, length: int) -> tuple[Any, ...]:
    if type(value) is not tuple or len(value) != length:
        raise TypeError(f"not a tuple of {length}")
    return value


def _table() -> Globals:
    """A table for one reading: it remembers which shared memory is open."""
    torch_reductions = "torch.multiprocessing.reductions"
    cuda = Rebuilder(f"{torch_reductions}.rebuild_cuda_tensor", rebuild_cuda_tensor)
    bucket = frozenset({"name", "shape", "dtype", "start_idx", "end_idx", "numel"})
    rebuilders: dict[tuple[str, str], Callable[..., object]] = {
        (torch_reductions, "rebuild_tensor"): _rebuild_tensor,
        (torch_reductions, "rebuild_typed_storage"): _rebuild_typed_storage,
        (torch_reductions, "rebuild_storage_filename"): _SharedMemory().rebuild,
        (torch_reductions, "rebuild_storage_empty"): lambda cls: torch.UntypedStorage(0),
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch", "Size"): _size,
        ("collections", "OrderedDict"): lambda: {},
    }
    markers = [
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
        *(("torch", cls.__name__) for cls in torch._storage_classes if cls.__module__ == "torch"),
    ]
    return {
        **{("torch", name): dtype for name, dtype in DTYPE_BY_NAME.items()},
        **{key: Marker(".".join(key)) for key in markers},
        **{key: Rebuilder(".".join(key), call) for key, call in rebuilders.items()},
        (torch_reductions, "rebuild_cuda_tensor"): cuda,
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): cuda,
        ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"): cuda,
        (BUCKET_MODULE, "FlattenedTensorMetadata"): HolderClass("FlattenedTensorMetadata", bucket),
        (BUCKET_MODULE, "FlattenedTensorBucket"): HolderClass(
            "FlattenedTensorBucket", frozenset({"flattened_tensor", "metadata"})
        ),
        **{(m, SERIALIZED_TENSOR): HolderClass(SERIALIZED_TENSOR, frozenset({"values"})) for m in SERIALIZED_MODULES},
        **{key: _by_descriptor(key) for key in _DESCRIPTOR_GLOBALS},
    }


_DESCRIPTOR_GLOBALS = (
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"),
    ("multiprocessing.resource_sharer", "DupFd"),
)


def _by_descriptor(key: tuple[str, str]) -> RefitRefusedError:
    return RefitRefusedError(
        f"a weight payload may not name {'.'.join(key)}: file descriptors can't be handed to an unrelated process",
        field=FIELD,
        value=".".join(key),
        hint="Send CPU tensors as safetensors, or after torch.multiprocessing.set_sharing_strategy('file_system').",
    )
