"""A gated activation, element by element."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16)


@triton.jit(do_not_specialize=["x_row"])
def silu_mul(
    x: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
) -> None:
    """Program (n, b) does the b-th BLOCK elements of row n. x's stride comes in units of UNIT elements."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = x + row * x_row * UNIT + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(tl.minimum(-gate, LARGEST_EXPONENT)))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activated * up).to(out.dtype.element_ty), mask=inside)
