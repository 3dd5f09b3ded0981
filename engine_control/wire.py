"""Messages between the HTTP process and an engine process, over a connected local stream socket.

A message is plain data (dicts, lists, text, numbers, booleans, None, bytes) with torch tensors at any depth. On the
wire it is one frame: a fixed prefix, a manifest (dtype, shape and byte length of each tensor), the body, then the raw
bytes of the tensors in order; manifest and body are msgpack. A tensor object that occurs in several places travels once
and arrives as one object. A body may also refer by number to tensors that the peer has from earlier messages. There is
no code in a frame: nothing here can execute what it reads.

Dataclasses and msgspec structs are written as maps, tuples as lists; the receiver rebuilds its types from those.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

MAGIC = b"drl1"
PREFIX = struct.Struct("<4sIIQ")  # magic, bytes of the manifest, of the body, of all tensors
TENSOR_REFERENCE = 1  # msgpack extension type: the index of a tensor in the manifest
EARLIER_TENSOR = 2  # the same: the number of a tensor that the peer has by now
BUFFERS_PER_CALL = 512  # below the kernel's IOV_MAX of 1024

DTYPES: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class WireError(Exception):
    """A frame that breaks the format or its limits. The connection it came from is of no further use."""


class PeerClosedError(WireError):
    """The other end is gone: it closed the connection between two frames, or in the middle of one."""


@dataclass(frozen=True)
class WireLimits:
    """Largest frame that is written or read. Sizes are checked before anything of that size is allocated."""

    max_header_bytes: int = 64 * 1024 * 1024
    max_tensors: int = 1_000_000
    max_tensor_bytes: int = 64 * 1024**3


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the manifest: `dtype` is torch's name without the `torch.`."""

    dtype: str
    shape: list[int]
    nbytes: int


_MANIFEST = msgspec.msgpack.Decoder(list[TensorSpec])
_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def send_message(
    connection: socket.socket,
    message: object,
    limits: WireLimits | None = None,
    *,
    earlier: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Writes one message and returns when the kernel has it all. The tensors' bytes are not copied on the way.

    Tensors of `earlier`, which the peer has by these numbers, are not sent.

    Raises:
        WireError: the message can't be written, or is over the limits. Nothing has been sent.
        OSError: the peer is gone.
    """
    _send_all(connection, frame(message, limits, earlier=earlier))


def receive_message(
    connection: socket.socket, limits: WireLimits | None = None, *, earlier: Mapping[int, torch.Tensor] | None = None
) -> Any:
    """Reads one message. Each tensor owns its memory, which the bytes were read into directly, or is one of `earlier`.

    Raises:
        PeerClosedError: there is no further message.
        WireError: what arrived is no frame, or one over the limits; close the connection.
    """
    limits = limits or WireLimits()
    magic, manifest_bytes, body_bytes, tensor_bytes = PREFIX.unpack(_receive(connection, PREFIX.size))
    if magic != MAGIC:
        raise WireError(f"a frame begins with {MAGIC!r}, not with {magic!r}")
    if manifest_bytes + body_bytes > limits.max_header_bytes:
        raise WireError(f"a header of {manifest_bytes + body_bytes} bytes, at most {limits.max_header_bytes} are read")
    if tensor_bytes > limits.max_tensor_bytes:
        raise WireError(f"tensors of {tensor_bytes} bytes, at most {limits.max_tensor_bytes} are read")
    specs = _read_manifest(_receive(connection, manifest_bytes), tensor_bytes, limits)
    body = _receive(connection, body_bytes)
    tensors = [_receive_tensor(connection, spec) for spec in specs]
    return _decode_body(body, tensors, earlier or {})


def frame(
    message: object, limits: WireLimits | None = None, *, earlier: Mapping[int, torch.Tensor] | None = None
) -> list[memoryview]:
    """The buffers of one frame, in order. They alias the message's (contiguous) tensors, except for those in `earlier`.

    Raises:
        WireError: a value or dtype that has no place in a frame, or a message over the limits.
    """
    limits = limits or WireLimits()
    indices: dict[int, int] = {}
    numbers = {id(tensor): number for number, tensor in (earlier or {}).items()}
    tensors: list[torch.Tensor] = []

    def reference(value: object) -> msgspec.msgpack.Ext | str | dict[object, object]:
        if isinstance(value, str):  # a subclass, such as torch's version
            return str.__str__(value)
        if isinstance(value, Mapping):
            return dict(value)
        if not isinstance(value, torch.Tensor):
            raise WireError(f"a message can't carry a {type(value).__name__}")
        if id(value) in numbers:
            return msgspec.msgpack.Ext(EARLIER_TENSOR, numbers[id(value)].to_bytes(8, "little"))
        if id(value) not in indices:
            _check_sendable(value)
            indices[id(value)] = len(tensors)
            tensors.append(value)
        return msgspec.msgpack.Ext(TENSOR_REFERENCE, indices[id(value)].to_bytes(4, "little"))

    try:
        body = msgspec.msgpack.encode(message, enc_hook=reference)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"the message can't be written: {error}") from error
    buffers = [tensor_bytes(tensor) for tensor in tensors]
    specs = [
        TensorSpec(str(t.dtype).removeprefix("torch."), list(t.shape), b.nbytes)
        for t, b in zip(tensors, buffers, strict=True)
    ]
    manifest = msgspec.msgpack.encode(specs)
    total = sum(spec.nbytes for spec in specs)
    if len(manifest) + len(body) > limits.max_header_bytes or len(tensors) > limits.max_tensors:
        raise WireError(f"a header of {len(manifest) + len(body)} bytes and {len(tensors)} tensors is over the limits")
    if total > limits.max_tensor_bytes:
        raise WireError(f"tensors of {total} bytes, at most {limits.max_tensor_bytes} are sent")
    prefix = PREFIX.pack(MAGIC, len(manifest), len(body), total)
    return [memoryview(part) for part in (prefix, manifest, body)] + [b for b in buffers if b.nbytes]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, as bytes. No copy if it is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())


def uninitialised(nbytes: int) -> memoryview:
    """Memory to receive into, with anything in it. Unlike a bytearray's it is not written to first, and large pieces
    have huge pages where the system gives some when asked (numpy asks): to fault in small ones takes longer than to
    receive their content.

    Raises:
        MemoryError: there is not that much.
    """
    return np.empty(nbytes, dtype=np.uint8).data


def _check_sendable(tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise WireError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} can't be sent")


def _send_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    first = 0
    while first < len(buffers):
        sent = connection.sendmsg(buffers[first : first + BUFFERS_PER_CALL])
        while first < len(buffers) and sent >= buffers[first].nbytes:
            sent -= buffers[first].nbytes
            first += 1
        if sent:
            buffers[first] = buffers[first][sent:]


def _receive(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _receive_into(connection, memoryview(data))
    return data


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        try:
            count = connection.recv_into(view)
        except ConnectionError as error:
            raise PeerClosedError(f"the peer is gone: {error}") from error
        if count == 0:
            raise PeerClosedError("the peer closed the connection")
        view = view[count:]


def _read_manifest(data: bytearray, tensor_bytes: int, limits: WireLimits) -> list[TensorSpec]:
    specs: list[TensorSpec] = _decoded(_MANIFEST.decode, data, "manifest")
    if len(specs) > limits.max_tensors:
        raise WireError(f"{len(specs)} tensors, at most {limits.max_tensors} are read")
    for spec in specs:
        dtype = _DTYPE_BY_NAME.get(spec.dtype)
        if dtype is None:
            raise WireError(f"unknown dtype {spec.dtype[:40]!r}")
        if min(spec.shape, default=0) < 0 or math.prod(spec.shape) * dtype.itemsize != spec.nbytes:
            raise WireError(f"shape {spec.shape[:8]} of {spec.dtype} is not {spec.nbytes} bytes")
        if len(spec.shape) > 64 or max(spec.shape, default=0) > limits.max_tensor_bytes:
            raise WireError(f"no tensor has a shape like {spec.shape[:8]}")
    if sum(spec.nbytes for spec in specs) != tensor_bytes:
        raise WireError(f"the manifest's tensors are not {tensor_bytes} bytes together")
    return specs


def _receive_tensor(connection: socket.socket, spec: TensorSpec) -> torch.Tensor:
    try:
        raw = uninitialised(spec.nbytes)
    except MemoryError as error:
        raise WireError(f"no memory for a tensor of {spec.nbytes} bytes: {error}") from error
    _receive_into(connection, raw)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=_DTYPE_BY_NAME[spec.dtype])
    return torch.frombuffer(raw, dtype=_DTYPE_BY_NAME[spec.dtype]).reshape(spec.shape)


def _decode_body(body: bytearray, tensors: list[torch.Tensor], earlier: Mapping[int, torch.Tensor]) -> object:
    def resolve(code: int, data: memoryview) -> torch.Tensor:
        index = int.from_bytes(data, "little")
        if code == EARLIER_TENSOR and len(data) == 8 and index in earlier:
            return earlier[index]
        if code != TENSOR_REFERENCE or len(data) != 4 or index >= len(tensors):
            raise WireError(f"extension {code} with {len(data)} bytes refers to no tensor of this frame")
        return tensors[index]

    return _decoded(msgspec.msgpack.Decoder(ext_hook=resolve).decode, body, "body")


def _decoded(decode: Callable[[bytearray], Any], data: bytearray, part: str) -> Any:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"malformed {part}: {error}") from error
