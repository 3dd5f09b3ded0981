"""RMS norm of rows, and of the sum of two."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16)


@triton.jit(do_not_specialize=["rows", "x_row", "residual_row"])
def rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """Program i does ROWS rows out of `[rows, WIDTH]`. Strides come in units of UNIT elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    source = x + (row * x_row)[:, None] * UNIT + column[None, :]
    wide = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    target = row[:, None] * WIDTH + column[None, :]
    if ADD:
        old = residual + (row * residual_row)[:, None] * UNIT + column[None, :]
        rounded = (wide + tl.load(old, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + target, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1) * (1.0 / WIDTH)
    normed = (wide * tl.rsqrt(mean_square + EPS)[:, None]).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + target, (normed * factor[None, :]).to(out.dtype.element_ty), mask=inside)
