"""What a block adds to its stream, and the norm that reads the stream next, in one pass.

Rounding rule: `residual + gate * y` in fp32, rounded once to the residual's dtype; the norm reads what was rounded, so
that it has the bits of `modulated_norm` on the new stream. The twins are in `reference`.
"""

from __future__ import annotations

from functools import partial

import torch

from rl_kernels import reference
from rl_kernels.fused import (
    block_of,
    check_dtypes,
    check_shape,
    differentiable,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
    units,
)


@seen_by_modes
def gated_residual(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`residual + gate * y`: residual and y `[B, T, D]`, gate `[B, D]`, result `[B, T, D]`, a new tensor.

    Raises:
        ValueError: shapes that don't fit, several dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    _check("gated_residual", residual, y, gate=gate)
    if not residual.numel() or not runs_on_triton(residual, residual.shape[-1]):
        return reference.gated_residual(residual, y, gate)
    return differentiable(_launch, _twin, (residual, y, gate))[0]


@seen_by_modes
def gated_residual_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    *,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(new, layer_norm(new) * (1 + scale) + shift)` with `new = residual + gate * y`, each `[B, T, D]`.

    gate, scale and shift `[B, D]` may be chunks of one wide projection.

    Raises:
        ValueError: as `gated_residual`.
    """
    _check("gated_residual_norm", residual, y, gate=gate, scale=scale, shift=shift)
    if not residual.numel() or not runs_on_triton(residual, residual.shape[-1]):
        return reference.gated_residual_norm(residual, y, gate, scale=scale, shift=shift, eps=eps)
    inputs = (residual, y, gate, scale, shift)
    total, normed = differentiable(partial(_launch, eps=eps), partial(_twin, eps=eps), inputs)
    return total, normed


def _check(operation: str, residual: torch.Tensor, y: torch.Tensor, **vectors: torch.Tensor) -> None:
    if residual.dim() != 3:
        raise ValueError(f"{operation} takes residual of shape [B, T, D], got {tuple(residual.shape)}")
    check_shape(operation, "y", y, tuple(residual.shape))
    for name, vector in vectors.items():
        check_shape(operation, name, vector, (residual.shape[0], residual.shape[2]))
    check_dtypes(operation, residual=residual, y=y, **vectors)


def _twin(
    residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, *norm: torch.Tensor, eps: float = 0.0
) -> tuple[torch.Tensor, ...]:
    if not norm:
        return (reference.gated_residual(residual, y, gate),)
    return reference.gated_residual_norm(residual, y, gate, scale=norm[0], shift=norm[1], eps=eps)


def _launch(
    residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, *norm: torch.Tensor, eps: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """The kernel, with the norm if its scale and shift are given."""
    from rl_kernels.jit.gated_residual import gated_residual as kernel

    samples, tokens, width = residual.shape
    residual, y, gate = readable(residual), readable(y), readable(gate)
    scale, shift = (readable(v) for v in norm) if norm else (gate, gate)
    outputs = tuple(residual.new_empty(samples, tokens, width) for _ in range(2 if norm else 1))
    launch(
        kernel,
        (tokens, samples),
        *(residual, y, gate, scale, shift, outputs[0], outputs[-1], tokens),
        *(units(residual, 0), units(residual, 1), units(y, 0), units(y, 1)),
        *(units(gate, 0), units(scale, 0), units(shift, 0)),
        EPS=eps,
        WIDTH=width,
        BLOCK=block_of(width),
        NORM=bool(norm),
        block=block_of(width),
    )
    return outputs
