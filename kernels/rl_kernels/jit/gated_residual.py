"""A gated residual, and the modulated norm of it, row by row."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.rows import layer_normalised

UNIT = tl.constexpr(16)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "residual_batch",
        "residual_token",
        "y_batch",
        "y_token",
        "gate_batch",
        "scale_batch",
        "shift_batch",
    ]
)
def gated_residual(
    residual: tl.tensor,
    y: tl.tensor,
    gate: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
    out: tl.tensor,
    normed: tl.tensor,
    tokens: tl.tensor,
    residual_batch: tl.tensor,
    residual_token: tl.tensor,
    y_batch: tl.tensor,
    y_token: tl.tensor,
    gate_batch: tl.tensor,
    scale_batch: tl.tensor,
    shift_batch: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Program (t, b) does token t of sample b. Strides come in units of UNIT elements."""
    token, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    old = residual + (sample * residual_batch + token * residual_token) * UNIT
    new = y + (sample * y_batch + token * y_token) * UNIT
    total = tl.load(old + column, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(new + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(gate + sample * gate_batch * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (total + weight * added).to(out.dtype.element_ty)
    target = (sample * tokens + token) * WIDTH + column
    tl.store(out + target, rounded, mask=inside)
    if NORM:
        factor = 1.0 + tl.load(scale + sample * scale_batch * UNIT + column, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(shift + sample * shift_batch * UNIT + column, mask=inside, other=0.0).to(tl.float32)
        normalised = layer_normalised(rounded.to(tl.float32), inside, EPS, WIDTH)
        tl.store(normed + target, (normalised * factor + offset).to(normed.dtype.element_ty), mask=inside)
