"""Arithmetic on one row, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_normalised(row: tl.tensor, inside: tl.tensor, eps: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """(row - mean) / sqrt(var + eps) of WIDTH elements; what lies outside them is neither read nor meant."""
    mean = tl.sum(tl.where(inside, row, 0.0), axis=0) * (1.0 / WIDTH)
    centred = tl.where(inside, row - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) * (1.0 / WIDTH)
    return centred * tl.rsqrt(variance + eps)
