"""Copies of tensors that lie in pieces, at the speed of memory.

torch copies a strided tensor element by element: of two-byte numbers at a third of the rate that an H200's memory has.
Where all pieces are multiples of 16 bytes, they are copied as elements of that size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WIDE = torch.complex128  # torch's largest element, 16 bytes; a copy doesn't look into it


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x.contiguous()`."""
    if x.is_contiguous() or of_autograd(x):
        return x.contiguous()
    return copy_(torch.empty(x.shape, dtype=x.dtype, device=x.device), x)


def copy_(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target.copy_(source)` of tensors of one shape and dtype on one device, outside autograd. Returns the target."""
    if _in_wide_pieces(target) and _in_wide_pieces(source):
        target.view(WIDE).copy_(source.view(WIDE))
    else:
        target.copy_(source)
    return target


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The parts behind each other, in the memory order of the first. `torch.cat` goes through strided parts element by
    element, at a fifth of the memory's speed; so that is for autograd alone."""
    if of_autograd(*parts):
        return torch.cat(list(parts), dim)
    first = parts[0]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    whole = torch.empty_permuted(shape, memory_order(first), dtype=first.dtype, device=first.device)
    start = 0
    for part in parts:
        copy_(whole.narrow(dim, start, part.shape[dim]), part)
        start += part.shape[dim]
    return whole


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of x, those with the longest strides first."""
    return sorted(range(x.dim()), key=lambda dim: -x.stride(dim))


def of_autograd(*tensors: torch.Tensor) -> bool:
    """Whether what is made of them has a gradient to pass on."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _in_wide_pieces(x: torch.Tensor) -> bool:
    """Whether the last dimension lies in one piece, and each of its rows begins and ends at a multiple of 16 bytes."""
    each = WIDE.itemsize // x.element_size()
    return (
        x.dim() > 0
        and x.stride(-1) == 1
        and x.shape[-1] % each == 0
        and x.storage_offset() % each == 0
        and x.data_ptr() % WIDE.itemsize == 0
        and all(stride % each == 0 for stride in x.stride()[:-1])
    )
