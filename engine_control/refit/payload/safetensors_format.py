"""The safetensors format, read and checked by its own rules: no code in it, and no byte that no tensor owns.

8 bytes (little-endian) with the header's length N, N bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the
data, which the tensors tile without a gap or an overlap. Source: the format's specification.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.payload.layout import as_bytes, byte_count, check_booleans, piece, shape_of

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: bytes `[start, end)` counted from the file's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(prefix: bytes | bytearray, total: int, *, field: str) -> int:
    """The length of the JSON header, which fits into the file of `total` bytes.

    Raises:
        RefitRefusedError: the file is cut short, or isn't safetensors.
    """
    if len(prefix) != PREFIX_BYTES:
        raise RefitRefusedError(
            f"{total} bytes are no safetensors file", field=field, hint="It is truncated, or not yet written."
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise RefitRefusedError(
            f"a header of {length} bytes, at most {MAX_HEADER_BYTES} are read", field=field, hint="Is it safetensors?"
        )
    if PREFIX_BYTES + length > total:
        raise RefitRefusedError(
            f"a header of {length} bytes in {total} bytes",
            field=field,
            hint="It is truncated, or half-written, or not safetensors.",
        )
    return length


def entries(header: bytes | bytearray | memoryview, total: int, *, field: str) -> list[Entry]:
    """The tensors that the header describes, in the order of their bytes, for a file of `total` bytes.

    Raises:
        RefitRefusedError: naming the tensor: unknown dtype, a shape that isn't its bytes, a name twice, bytes that
            belong to two tensors or to none, a file that is shorter or longer than its tensors.
    """
    begin = PREFIX_BYTES + len(header)
    try:
        table = json.loads(bytes(header), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RefitRefusedError(f"the safetensors header can't be read: {error}", field=field) from error
    if not isinstance(table, dict):
        raise RefitRefusedError("the safetensors header is not an object", field=field)
    table.pop("__metadata__", None)
    found = sorted((_entry(name, spec, begin) for name, spec in table.items()), key=lambda e: (e.start, e.end))
    position = begin
    for entry in found:
        if entry.start != position:
            kind = "overlap" if entry.start < position else "leave a gap"
            raise RefitRefusedError(f"the tensors of the file {kind} before {entry.name!r}", field=entry.name)
        position = entry.end
    if position != total:
        raise RefitRefusedError(
            f"the header describes {position} bytes and there are {total}",
            field=field,
            hint="It is truncated, half-written, or has bytes behind its last tensor.",
        )
    return found


def tensors(data: bytes | bytearray | memoryview | torch.Tensor, *, field: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file in memory, in the order of their bytes; all is checked before the first.

    data: bytes, whose tensors are copied out one at a time; or a flat uint8 CPU tensor, of which views are handed out.

    Raises:
        RefitRefusedError: as `entries` does.
    """
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu":
            raise RefitRefusedError(f"a {data.dim()}-D {data.dtype} tensor on {data.device} is no file", field=field)
        flat = data.contiguous()
        view = memoryview(flat.numpy())
    else:
        flat = None
        view = memoryview(data).cast("B")
    length = header_bytes(bytes(view[:PREFIX_BYTES]), view.nbytes, field=field)
    found = entries(view[PREFIX_BYTES : PREFIX_BYTES + length], view.nbytes, field=field)
    return _read(view, flat, found)


def _read(view: memoryview, flat: torch.Tensor | None, found: list[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in found:
        if flat is not None:
            tensor = piece(flat, entry.start, entry.dtype, entry.shape)
        else:
            raw = torch.empty(entry.end - entry.start, dtype=torch.uint8)
            memoryview(raw.numpy())[:] = view[entry.start : entry.end]
            tensor = piece(raw, 0, entry.dtype, entry.shape)
        yield entry.name, check_booleans(tensor, name=entry.name)


def file_bytes(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> bytearray:
    """A safetensors file with those tensors, larger elements first, so that each is aligned.

    Raises:
        ValueError: a name twice, or a dtype that the format has no code for.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if name in named or tensor.dtype not in _CODES:
            raise ValueError(f"{name!r} of {tensor.dtype}: each name once, of {', '.join(_CODES.values())}")
        named[name] = tensor
    order = sorted(named, key=lambda name: (-named[name].dtype.itemsize, name))
    table, position = {}, 0
    for name in order:
        end = position + named[name].nbytes
        code = _CODES[named[name].dtype]
        table[name] = {"dtype": code, "shape": list(named[name].shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    begin = PREFIX_BYTES + len(header)
    file = bytearray(begin + position)
    file[:begin] = len(header).to_bytes(8, "little") + header
    for name in order:
        start, end = table[name]["data_offsets"]
        memoryview(file)[begin + start : begin + end] = memoryview(as_bytes(named[name]).cpu().numpy())
    return file


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} occurs twice")
    return table


def _entry(name: str, spec: object, begin: int) -> Entry:
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise RefitRefusedError("not an entry with dtype, shape and data_offsets", field=name)
    code = spec["dtype"]
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise RefitRefusedError(
            "unknown safetensors dtype", field=name, value=code, hint=f"Known: {', '.join(DTYPES)}."
        )
    shape = shape_of(spec["shape"], field=name)
    offsets = spec["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise RefitRefusedError("data_offsets are not two positions", field=name, value=offsets)
    if offsets[1] - offsets[0] != byte_count(shape, dtype):
        raise RefitRefusedError(
            f"shape {list(shape)} of {code} is {byte_count(shape, dtype)} bytes, its data_offsets are {offsets}",
            field=name,
        )
    return Entry(name, dtype, shape, begin + offsets[0], begin + offsets[1])
