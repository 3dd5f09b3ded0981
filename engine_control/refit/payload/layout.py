"""Tensors as bytes: dtype names, shapes, and pieces of a flat uint8 buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine_control.errors import RefitRefusedError
from engine_control.wire import DTYPES

MAX_DIMENSIONS = 64
DTYPE_BY_NAME: dict[str, torch.dtype] = {
    name.removeprefix("torch."): dtype
    for dtype in (
        *DTYPES,
        *(
            getattr(torch, name)
            for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
            if hasattr(torch, name)
        ),
    )
    for name in (str(dtype),)
}


def dtype_named(name: object, *, field: str) -> torch.dtype:
    """The dtype of torch's name, with or without `torch.`.

    Raises:
        RefitRefusedError: there is no such dtype.
    """
    dtype = DTYPE_BY_NAME.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise RefitRefusedError("not a dtype", field=field, value=name, hint="Send a name such as 'bfloat16'.")
    return dtype


def shape_of(value: object, *, field: str) -> tuple[int, ...]:
    """The shape, of integers that are not negative.

    Raises:
        RefitRefusedError: it is no shape.
    """
    good = (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**62 for n in value)
    )
    if not good or math.prod(n for n in value if n) >= 2**62:  # type: ignore[attr-defined]
        raise RefitRefusedError(
            "not the shape of a tensor", field=field, value=value, hint="Send a list of sizes, none negative."
        )
    return tuple(value)  # type: ignore[arg-type]


def byte_count(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * int(dtype.itemsize)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as a flat uint8 tensor on the same device: a view if that is possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def piece(buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that begins at byte `start` of a flat uint8 buffer, which reaches that far.

    A view; a copy if that place is not aligned for the dtype.
    """
    return of_bytes(buffer[start : start + byte_count(shape, dtype)], dtype, shape)


def of_bytes(part: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of those bytes, flat uint8, as many as it has. A view; a copy if they aren't aligned for the dtype."""
    if not part.numel():
        return torch.empty(tuple(shape), dtype=dtype, device=part.device)
    if part.storage_offset() % dtype.itemsize or part.data_ptr() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(tuple(shape))


def check_booleans(tensor: torch.Tensor, *, name: str) -> torch.Tensor:
    """The tensor itself. Of bools it holds afterwards that each byte is 0 or 1; anything else is undefined in torch.

    Raises:
        RefitRefusedError: another byte occurs.
    """
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise RefitRefusedError("a bool tensor with bytes other than 0 and 1", field=name)
    return tensor
