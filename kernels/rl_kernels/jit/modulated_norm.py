"""Layer norm with one or two scale and shift pairs, row by row."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.rows import layer_normalised

UNIT = tl.constexpr(16)


@triton.jit(do_not_specialize=["tokens", "x_batch", "x_token", "batch_1", "batch_2", "batch_3", "batch_4"])
def modulated_norm(
    x: tl.tensor,
    scale_1: tl.tensor,
    shift_1: tl.tensor,
    out_1: tl.tensor,
    scale_2: tl.tensor,
    shift_2: tl.tensor,
    out_2: tl.tensor,
    tokens: tl.tensor,
    x_batch: tl.tensor,
    x_token: tl.tensor,
    batch_1: tl.tensor,
    batch_2: tl.tensor,
    batch_3: tl.tensor,
    batch_4: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIR: tl.constexpr,
) -> None:
    """Program (t, b) does token t of sample b. Strides come in units of UNIT elements."""
    token, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = x + (sample * x_batch + token * x_token) * UNIT
    row = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 + tl.load(scale_1 + sample * batch_1 * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift_1 + sample * batch_2 * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    normed = layer_normalised(row, inside, EPS, WIDTH)
    target = (sample * tokens + token) * WIDTH + column
    tl.store(out_1 + target, (normed * factor + offset).to(out_1.dtype.element_ty), mask=inside)
    if PAIR:
        factor = 1.0 + tl.load(scale_2 + sample * batch_3 * UNIT + column, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(shift_2 + sample * batch_4 * UNIT + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_2 + target, (normed * factor + offset).to(out_2.dtype.element_ty), mask=inside)
