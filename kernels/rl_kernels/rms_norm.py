"""RMS norm as language models have it, alone and behind a residual addition.

Rounding rule, that of transformers' Qwen3RMSNorm: x / sqrt(mean of squares + eps) in fp32, rounded to x's dtype, times
the weight, rounded again. (`norms.rms_norm` rounds once.) The twins below are what runs on a CPU and without Triton.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from rl_kernels.fused import (
    MAX_BLOCK,
    block_of,
    check_dtypes,
    check_shape,
    differentiable,
    empty_rows,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
    units,
)
from rl_kernels.reduce import folded_mean

BLOCK = 2048  # elements of a program; a wider row has one of its own


@seen_by_modes
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x `[..., D]`, weight `[D]`, result of x's shape. Rows are all that x has in front of D.

    A row's bits depend on the row, the weight, D and the dtype alone.

    Raises:
        ValueError: a weight that doesn't fit, several dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    _check("rms_norm", x, weight)
    twin = partial(_twin, eps=eps)
    if not x.numel() or not runs_on_triton(x, x.shape[-1]):
        return twin(x, weight)[0]
    return differentiable(partial(_launch, eps=eps), twin, (x, weight))[0]


@seen_by_modes
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(total), total)` with total = residual + x, rounded: x and residual `[..., D]`, weight `[D]`.

    Raises:
        ValueError: as `rms_norm`, and a residual of another shape.
    """
    _check("add_rms_norm", x, weight, residual)
    twin = partial(_added_twin, eps=eps)
    if not x.numel() or not runs_on_triton(x, x.shape[-1]):
        outputs = twin(x, residual, weight)
    else:
        outputs = differentiable(partial(_launch_added, eps=eps), twin, (x, residual, weight))
    return outputs[0], outputs[1]


def _check(operation: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    check_shape(operation, "weight", weight, (x.shape[-1],))
    if residual is not None:
        check_shape(operation, "residual", residual, tuple(x.shape))
    check_dtypes(operation, x=x, weight=weight, residual=residual)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch, and unchecked.

    The library's mean of one row has one order; of a very wide row that stands alone it hasn't. In fp32 nothing is
    rounded in between, so on a CPU the library's own norm has the same bits, in one call.
    """
    very_wide = x.shape[-1] > MAX_BLOCK
    if x.dtype == torch.float32 and x.device.type == "cpu" and not very_wide:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float().contiguous()
    squares = wide.square()
    mean = folded_mean(squares, keepdim=True) if very_wide else squares.mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight


def _twin(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> tuple[torch.Tensor]:
    return (normed(x, weight, eps),)


def _added_twin(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return *_twin(total, weight, eps=eps), total


def _launch(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> tuple[torch.Tensor]:
    return (_run(x, None, weight, eps=eps)[0],)


def _launch_added(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    return _run(x, residual, weight, eps=eps)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, ...]:
    """The kernel, with the sum or without: the norm, and the sum if there is one."""
    from rl_kernels.jit.rms_norm import rms_norm as kernel

    shape, width = x.shape, x.shape[-1]
    rows = readable(x.reshape(-1, width))
    old = rows if residual is None else readable(residual.reshape(-1, width))
    out = empty_rows(x, len(rows), width).view(shape)
    total = out if residual is None else x.new_empty(shape)
    block = block_of(width)
    together = max(BLOCK // block, 1)
    launch(
        kernel,
        (-(-len(rows) // together),),
        *(rows, old, readable(weight), out, total, len(rows), units(rows, 0), units(old, 0)),
        EPS=eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=together,
        ADD=residual is not None,
        block=together * block,
    )
    return out, total
