"""Arithmetic on one row, or on each element, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_EXPONENT = tl.constexpr(88.0)  # exp of it is a finite number


@triton.jit
def layer_normalised(row: tl.tensor, inside: tl.tensor, eps: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """(row - mean) / sqrt(var + eps) of WIDTH elements; what lies outside them is neither read nor meant."""
    mean = tl.sum(tl.where(inside, row, 0.0), axis=0) * (1.0 / WIDTH)
    centred = tl.where(inside, row - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) * (1.0 / WIDTH)
    return centred * tl.rsqrt(variance + eps)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """x / (1 + exp(-x))."""
    return x / (1.0 + tl.exp(tl.minimum(-x, LARGEST_EXPONENT)))
