"""Rows of plain data and tensors as a response body, and back: JSON, msgpack and safetensors.

In JSON and msgpack a tensor is a map `{"__tensor__": true, "data": ..., "shape": [...], "dtype": "torch.float32"}`,
whose data is a safetensors file with the single key `t`: base64 text in JSON, bytes in msgpack. The third form is one
safetensors file for the whole response: its metadata entry `rollout` holds the rows as JSON, with
`{"__tensor__": name}` in place of each tensor, and a tensor that several rows share is in it once.

A body is never built in one piece. A skeleton is encoded in which each tensor is a random marker; it is cut at the
markers, and the chunks between and behind them (at most 1 MiB, views of the tensors where the form allows it) are
handed out one by one. No single piece of work holds the interpreter lock for more than about a millisecond.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
import torch

from diffusion_rl.config import Wire
from engine_control.errors import NotAcceptableError
from engine_control.wire import tensor_bytes

CHUNK_BYTES = 1024 * 1024
SMALL_BYTES = 128 * 1024  # smaller pieces are copied together into one chunk
BASE64_INPUT_BYTES = CHUNK_BYTES // 4 * 3  # a multiple of 3: each chunk's base64 needs no padding but the last one's
VIEWED_BYTES = 64 * 1024  # in msgpack, smaller tensors are decoded to copies, larger ones to views of the body
ALIGNMENT = 8  # of a tensor's bytes in a body, in bytes: the largest item's size
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_BIN_BYTES = 2**32 - 1
BIN_32, BIN_32_HEAD_BYTES = 0xC6, 5  # msgpack's longest `bin`: its first byte, and the bytes before its content

CONTENT_TYPES: Mapping[Wire, str] = {
    "json": "application/json",
    "msgpack": "application/msgpack",
    "safetensors": "application/vnd.safetensors",
}
SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}

T = TypeVar("T")
Row = Mapping[str, Any]
Buffer = bytes | bytearray | memoryview
_LAYER = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw] | str)


class DecodeError(ValueError):
    """Bytes that are no body of the form they were taken for."""


@dataclass(frozen=True)
class Base64:
    """Buffers whose concatenation is sent as base64; all but the last have a multiple of 3 bytes."""

    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return 4 * ((sum(buffer.nbytes for buffer in self.buffers) + 2) // 3)


@dataclass(frozen=True)
class EncodedBody:
    """A response body whose length is known and whose bytes come in chunks."""

    content_type: str
    parts: tuple[memoryview | Base64, ...]

    @property
    def content_length(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def costs_work(self) -> bool:
        """Whether chunks are computed, not only cut off."""
        return any(isinstance(part, Base64) for part in self.parts)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The body's bytes, at most `CHUNK_BYTES` at a time. Small pieces travel together: a chunk costs the server a
        thread's turn and a write, whatever its size."""
        held = bytearray()
        for piece in self._pieces():
            if len(piece) >= SMALL_BYTES:
                if held:
                    yield memoryview(held)
                    held = bytearray()
                yield piece
                continue
            held += piece
            if len(held) >= CHUNK_BYTES - SMALL_BYTES:
                yield memoryview(held)
                held = bytearray()
        if held:
            yield memoryview(held)

    def _pieces(self) -> Iterator[bytes | memoryview]:
        for part in self.parts:
            if isinstance(part, Base64):
                for buffer in part.buffers:
                    for piece in _slices(buffer, BASE64_INPUT_BYTES):
                        yield binascii.b2a_base64(piece, newline=False)
            else:
                yield from _slices(part, CHUNK_BYTES)


def encode(rows: Sequence[Row], wire: Wire) -> EncodedBody:
    """The rows as a body of that form. It refers to the tensors' memory, which must not change while it is sent.

    Raises:
        NotAcceptableError: msgpack has no form for a tensor of this size.
    """
    if wire == "safetensors":
        return _encode_safetensors(rows)
    tensors: list[torch.Tensor] = []
    nonce = secrets.token_hex(16)

    def stand_in(path: str, tensor: torch.Tensor) -> dict[str, object]:
        tensors.append(tensor)
        marker = f"{nonce}{len(tensors) - 1:08x}"
        data = marker if wire == "json" else msgspec.Raw(marker.encode())
        return {"__tensor__": True, "data": data, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}

    skeleton = _with_stand_ins(list(rows), "", stand_in)
    text = orjson.dumps(skeleton) if wire == "json" else msgspec.msgpack.encode(skeleton)
    contents: dict[int, memoryview] = {}
    parts: list[memoryview | Base64] = []
    length = 0
    for position, piece in enumerate(re.split(nonce.encode() + rb"([0-9a-f]{8})", text)):
        if position % 2 == 0:
            added: list[memoryview | Base64] = [memoryview(piece)]
        else:
            tensor = tensors[int(piece, 16)]
            if id(tensor) not in contents:
                contents[id(tensor)] = tensor_bytes(tensor)
            content = contents[id(tensor)]
            if wire == "json":
                added = [Base64((memoryview(_file_header(tensor)), content))]
            else:
                added = [memoryview(_bin_until_content(tensor, length)), content]
        parts.extend(added)
        length += sum(part.nbytes for part in added)
    return EncodedBody(CONTENT_TYPES[wire], tuple(parts))


def decode_json(data: Buffer) -> list[dict[str, Any]]:
    """The rows of a JSON body.

    Raises:
        DecodeError: it is none.
    """
    return _decode_maps(lambda: orjson.loads(data), _from_base64)


def decode_msgpack(data: Buffer) -> list[dict[str, Any]]:
    """The rows of a msgpack body. Tensors of `VIEWED_BYTES` and more are views of `data` if that can be written to,
    else of one copy of it; one that lies at no multiple of its item's size is a copy.

    Raises:
        DecodeError: it is none.
    """
    body = _writable(data)
    return _decode_maps(lambda: _decode_layer(msgspec.Raw(body), body), lambda data: data)


def decode_safetensors(data: Buffer) -> list[dict[str, Any]]:
    """The rows of a safetensors body. Tensors are views of `data` if that can be written to, else of one copy of it;
    a tensor that rows share is one object.

    Raises:
        DecodeError: it is none.
    """
    tensors, metadata = parse_safetensors(data)
    try:
        return [_resolve_names(row, tensors) for row in json.loads(metadata["rollout"])]
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeError(f"the file's metadata holds no rollout: {error}") from error


def json_value(value: object) -> Any:
    """Plain data that `json` can write, with each tensor in it as it stands in a JSON body: for requests."""

    def tensor_map(path: str, tensor: torch.Tensor) -> dict[str, object]:
        data = base64.b64encode(b"".join((_file_header(tensor), tensor_bytes(tensor)))).decode()
        return {"__tensor__": True, "data": data, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}

    return _with_stand_ins(value, "", tensor_map)


def value_of_json(value: Any) -> Any:
    """`json_value` undone.

    Raises:
        DecodeError: a tensor in it is none.
    """
    return _decoded(lambda: _resolve_maps(value, _from_base64))


def parse_safetensors(data: Buffer) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file in memory.

    Raises:
        DecodeError: not such a file, or one whose tensors leave gaps, overlap or disagree with their shapes.
    """
    buffer = _writable(data)
    size = int.from_bytes(buffer[:8], "little")
    if len(buffer) < 8 or size > min(MAX_HEADER_BYTES, len(buffer) - 8):
        raise DecodeError("the file is shorter than its header says")
    try:
        header = json.loads(bytes(buffer[8 : 8 + size]))
        metadata = header.pop("__metadata__", {})
        entries = [(*entry["data_offsets"], name, entry) for name, entry in header.items()]
        entries.sort(key=lambda item: item[:2])
        position, tensors = 0, {}
        for start, end, name, entry in entries:
            dtype, shape = TORCH_DTYPES[entry["dtype"]], entry["shape"]
            if start != position or min(shape, default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
                raise DecodeError(f"tensor {name!r} does not fit its place in the file")
            tensors[name] = _view(buffer, 8 + size + start, dtype, shape)
            position = end
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DecodeError(f"malformed header: {error!r}") from error
    if position != len(buffer) - 8 - size:
        raise DecodeError("the tensors don't fill the file")
    return tensors, metadata


def _encode_safetensors(rows: Sequence[Row]) -> EncodedBody:
    names: dict[int, str] = {}
    tensors: list[tuple[str, torch.Tensor]] = []

    def stand_in(path: str, tensor: torch.Tensor) -> dict[str, object]:
        if id(tensor) not in names:
            names[id(tensor)] = path
            tensors.append((path, tensor))
        return {"__tensor__": names[id(tensor)]}

    metadata = {"rollout": orjson.dumps(_with_stand_ins(list(rows), "", stand_in)).decode()}
    tensors.sort(key=lambda item: -item[1].dtype.itemsize)  # so that each tensor lies at a multiple of its item's size
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, tensor in tensors:
        header[name] = _file_entry(tensor, position)
        position += tensor.nbytes
    parts = [memoryview(_padded_header(header, multiple=64)), *(tensor_bytes(tensor) for _, tensor in tensors)]
    return EncodedBody(CONTENT_TYPES["safetensors"], tuple(parts))


def _with_stand_ins(value: object, path: str, stand_in: Callable[[str, torch.Tensor], object]) -> object:
    if isinstance(value, torch.Tensor):
        return stand_in(path, value)
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _with_stand_ins(item, f"{prefix}{key}", stand_in) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_stand_ins(item, f"{prefix}{i}", stand_in) for i, item in enumerate(value)]
    return value


def _file_entry(tensor: torch.Tensor, position: int) -> dict[str, object]:
    offsets = [position, position + tensor.nbytes]
    return {"dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}


def _file_header(tensor: torch.Tensor) -> bytes:
    """The beginning of the tensor's own file: a multiple of 3 bytes for base64, and of 8 for the reader's alignment."""
    return _padded_header({"t": _file_entry(tensor, 0)}, multiple=24)


def _padded_header(header: Mapping[str, object], *, multiple: int, position: int = 0) -> bytes:
    """A file's header that begins at that position, and ends at a multiple."""
    text = orjson.dumps(header)
    text += b" " * (-(position + 8 + len(text)) % multiple)
    return len(text).to_bytes(8, "little") + text


def _bin_until_content(tensor: torch.Tensor, position: int) -> bytes:
    """The beginning, at that position of a body, of a msgpack `bin` that holds the tensor's own file. Of a tensor that
    is decoded to a view the elements lie aligned in the body."""
    if tensor.nbytes < VIEWED_BYTES:
        header = _file_header(tensor)
    else:
        entry = {"t": _file_entry(tensor, 0)}
        header = _padded_header(entry, multiple=ALIGNMENT, position=position + BIN_32_HEAD_BYTES)
    return _bin_prefix(len(header) + tensor.nbytes) + header


def _bin_prefix(size: int) -> bytes:
    """The head of a msgpack `bin` of that many bytes, in its shortest form."""
    if size > MAX_BIN_BYTES:
        raise NotAcceptableError(
            f"msgpack holds no tensor of {size} bytes, only up to {MAX_BIN_BYTES}",
            field="Accept",
            value=CONTENT_TYPES["msgpack"],
            hint=f"Ask for {CONTENT_TYPES['safetensors']}, or for less (fewer steps, rollout_debug_mode=false).",
        )
    if size < 2**8:
        return b"\xc4" + size.to_bytes(1, "big")
    return b"\xc5" + size.to_bytes(2, "big") if size < 2**16 else b"\xc6" + size.to_bytes(4, "big")


def _slices(view: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, size):
        yield view[start : start + size]


def _decode_maps(load: Callable[[], Any], to_buffer: Callable[[Any], Buffer]) -> list[dict[str, Any]]:
    def decode() -> list[dict[str, Any]]:
        rows = load()
        if not isinstance(rows, list):
            raise DecodeError("the body is not a list of rows")
        return [_resolve_maps(row, to_buffer) for row in rows]

    return _decoded(decode)


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except DecodeError:
        raise
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DecodeError(f"malformed body: {error}") from error


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_layer(raw: msgspec.Raw, body: memoryview) -> Any:
    """What msgpack says at that place of the body; of what is large, the data of tensors are views of the body."""
    view = memoryview(raw)
    if view.nbytes < VIEWED_BYTES:
        return msgspec.msgpack.decode(raw)
    if view[0] == BIN_32:
        start = _address(view) - _address(body)  # the same memory, but a `Raw` can't be written to
        return body[start + BIN_32_HEAD_BYTES : start + view.nbytes]
    value = _LAYER.decode(raw)
    if isinstance(value, list):
        return [_decode_layer(item, body) for item in value]
    return {key: _decode_layer(item, body) for key, item in value.items()} if isinstance(value, dict) else value


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _writable(data: Buffer) -> memoryview:
    """The data as bytes that can be written to: its own memory if it allows that, else a copy of it."""
    view = memoryview(data).cast("B")
    return memoryview(bytearray(view)) if view.readonly else view


def _resolve_maps(value: Any, to_buffer: Callable[[Any], Buffer]) -> Any:
    if isinstance(value, list):
        return [_resolve_maps(item, to_buffer) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("__tensor__") is True:
        return parse_safetensors(to_buffer(value["data"]))[0]["t"]
    return {key: _resolve_maps(item, to_buffer) for key, item in value.items()}


def _resolve_names(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_resolve_names(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    return {key: _resolve_names(item, tensors) for key, item in value.items()}


def _view(buffer: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:  # torch.frombuffer refuses empty views
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(tuple(shape))
    return flat.clone() if flat.data_ptr() % dtype.itemsize else flat
