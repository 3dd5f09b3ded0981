"""Adaptive layer norm in one pass: normed, scaled and shifted by the sample's own vectors.

Rounding rule: everything in fp32, one rounding at the end to x's dtype. (The separate operations round four times in
half precision.) The twins are `reference.modulated_norm`.
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
def modulated_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """`layer_norm(x) * (1 + scale) + shift`: x `[B, T, D]`, scale and shift `[B, D]`, result `[B, T, D]`.

    scale and shift may be chunks of one wide projection; nothing is copied. A token's bits depend on its own row, its
    sample's scale and shift, D and the dtype alone.

    Raises:
        ValueError: shapes that don't fit, several dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    _check("modulated_norm", x, scale=scale, shift=shift)
    twin = partial(_twin, eps=eps)
    if not x.numel() or not runs_on_triton(x, x.shape[-1]):
        return twin(x, scale, shift)[0]
    return differentiable(partial(_launch, eps=eps), twin, (x, scale, shift))[0]


@seen_by_modes
def modulated_norm_pair(
    x: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    *,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two `modulated_norm`s of one x in one pass, with a `(scale, shift)` each. Same bits as two calls.

    Raises:
        ValueError: as `modulated_norm`.
    """
    inputs = (x, *first, *second)
    _check("modulated_norm_pair", x, scale=first[0], shift=first[1], scale_2=second[0], shift_2=second[1])
    twin = partial(_twin, eps=eps)
    if not x.numel() or not runs_on_triton(x, x.shape[-1]):
        outputs = twin(*inputs)
    else:
        outputs = differentiable(partial(_launch, eps=eps), twin, inputs)
    return outputs[0], outputs[1]


def _check(operation: str, x: torch.Tensor, **vectors: torch.Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"{operation} takes x of shape [B, T, D], got {tuple(x.shape)}")
    for name, vector in vectors.items():
        check_shape(operation, name, vector, (x.shape[0], x.shape[2]))
    check_dtypes(operation, x=x, **vectors)


def _twin(x: torch.Tensor, *vectors: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    pairs = zip(vectors[0::2], vectors[1::2], strict=True)
    return tuple(reference.modulated_norm(x, scale, shift, eps=eps) for scale, shift in pairs)


def _launch(x: torch.Tensor, *vectors: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    """The kernel on one pair of vectors or on two."""
    from rl_kernels.jit.modulated_norm import modulated_norm as kernel

    samples, tokens, width = x.shape
    x = readable(x)
    vectors = tuple(readable(v) for v in vectors)
    outputs = tuple(x.new_empty(samples, tokens, width) for _ in vectors[0::2])
    scale, shift, scale_2, shift_2 = *vectors[:2], *vectors[-2:]
    launch(
        kernel,
        (tokens, samples),
        *(x, scale, shift, outputs[0], scale_2, shift_2, outputs[-1], tokens),
        *(units(x, 0), units(x, 1), *(units(v, 0) for v in (scale, shift, scale_2, shift_2))),
        EPS=eps,
        WIDTH=width,
        BLOCK=block_of(width),
        PAIR=len(outputs) == 2,
        block=block_of(width),
    )
    return outputs
