"""Many tensors in one flat uint8 tensor, one behind the other, with the place of each in a list.

The layout is that of SGLang's flattened buckets: `start_idx`, `end_idx` and `numel` count bytes, nothing is aligned,
and a bucket may be empty. Earlier releases kept the tensors' own dtype and counted elements; such buckets are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from engine_control.errors import RefitRefusedError
from engine_control.refit.payload.layout import as_bytes, byte_count, check_booleans, dtype_named, piece, shape_of

METADATA_FIELDS = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")


@dataclass
class FlattenedTensorMetadata:
    """A tensor's place in a bucket. The indices and `numel` count bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass(frozen=True)
class Placed:
    """A tensor's checked place: bytes `[start, end)` of the bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


def flatten(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[FlattenedTensorMetadata]]:
    """One uint8 tensor `[bytes]` with copies of all, in order, and where each lies.

    Tensors of larger elements come first if they are sent first: only then can the receiver read all without a copy.
    """
    parts: list[torch.Tensor] = []
    metadata: list[FlattenedTensorMetadata] = []
    start = 0
    for name, tensor in named_tensors:
        part = as_bytes(tensor)
        end = start + part.numel()
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, end - start))
        parts.append(part)
        start = end
    return (torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)), metadata


def unflatten(bucket: object, *, field: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, in order: views, or copies where a view would not be aligned.

    `bucket` is `{"flattened_tensor": tensor, "metadata": [...]}`; an entry of the list has the fields of
    `FlattenedTensorMetadata`, as attributes or as keys. Everything is checked before the first tensor is handed out.

    Raises:
        RefitRefusedError: it is no bucket, or a tensor of it does not lie where it says.
    """
    if not isinstance(bucket, Mapping) or not {"flattened_tensor", "metadata"} <= set(bucket):
        raise RefitRefusedError(
            f"a {type(bucket).__name__} is no bucket",
            field=field,
            hint="Send a dict with 'flattened_tensor' and 'metadata'.",
        )
    flat, metadata = bucket["flattened_tensor"], bucket["metadata"]
    if not isinstance(flat, torch.Tensor) or flat.dim() != 1 or flat.layout != torch.strided:
        raise RefitRefusedError("flattened_tensor is not a flat tensor", field=field, value=type(flat).__name__)
    if not isinstance(metadata, list | tuple):
        raise RefitRefusedError("metadata is not a list", field=field, value=type(metadata).__name__)
    unit = flat.dtype.itemsize if flat.dtype != torch.uint8 else 1
    places = [_placed(entry, flat, unit) for entry in metadata]
    _refuse_overlaps(places)
    return _pieces(as_bytes(flat), places)


def _pieces(flat: torch.Tensor, places: list[Placed]) -> Iterator[tuple[str, torch.Tensor]]:
    for place in places:
        yield place.name, check_booleans(piece(flat, place.start, place.dtype, place.shape), name=place.name)


def _placed(entry: object, flat: torch.Tensor, unit: int) -> Placed:
    values = [entry.get(f) if isinstance(entry, Mapping) else getattr(entry, f, None) for f in METADATA_FIELDS]
    name, shape, dtype, *indices = values
    if not isinstance(name, str) or not name:
        raise RefitRefusedError("a bucket's entry has no name", field="metadata", value=name)
    shape = shape_of(shape, field=name)
    if not isinstance(dtype, torch.dtype):
        dtype = dtype_named(dtype, field=name)
    start, end, numel = (n if type(n) is int else -1 for n in indices)
    if min(start, end, numel) < 0:
        raise RefitRefusedError("start_idx, end_idx and numel are not positions", field=name, value=indices)
    if flat.dtype not in (torch.uint8, dtype):
        raise RefitRefusedError(
            f"the bucket holds elements of {flat.dtype}, and counts in them, but its entry says {dtype}",
            field=name,
            hint="Send mixed dtypes as one uint8 bucket that counts bytes.",
        )
    if not start <= end <= flat.numel():
        raise RefitRefusedError(
            f"bytes {start * unit} to {end * unit} of a bucket of {flat.nbytes} bytes", field=name, value=end
        )
    if not end - start == numel or (end - start) * unit != byte_count(shape, dtype):
        raise RefitRefusedError(
            f"shape {shape} of {dtype} is {byte_count(shape, dtype)} bytes, but the bucket has {(end - start) * unit} "
            f"(numel {numel}) for it",
            field=name,
            value=numel,
        )
    return Placed(name, shape, dtype, start * unit, end * unit)


def _refuse_overlaps(places: list[Placed]) -> None:
    before: Placed | None = None
    for place in sorted((p for p in places if p.end > p.start), key=lambda p: p.start):
        if before is not None and place.start < before.end:
            raise RefitRefusedError(f"it shares bytes of the bucket with {before.name!r}", field=place.name)
        before = place
