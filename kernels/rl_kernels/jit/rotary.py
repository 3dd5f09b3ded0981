"""Rotation of heads, the first half of a head against the second."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16)


@triton.jit(do_not_specialize=["x_row", "x_head"])
def rotary(
    x: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program n does all heads of row n. Strides come in units of UNIT elements; out is contiguous. Every factor and
    product is rounded to out's dtype."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (column < HALF)[None, :]
    turn = cos_sin + tl.load(positions + row).to(tl.int64) * (2 * HALF) + column
    kind = out.dtype.element_ty
    cos = tl.load(turn, mask=column < HALF, other=0.0).to(kind).to(tl.float32)[None, :]
    sin = tl.load(turn + HALF, mask=column < HALF, other=0.0).to(kind).to(tl.float32)[None, :]
    source = x + (row * x_row + head * x_head)[:, None] * UNIT + column[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (row * HEADS + head)[:, None] * (2 * HALF) + column[None, :]
    along, across = (first * cos).to(kind).to(tl.float32), (second * sin).to(kind).to(tl.float32)
    tl.store(target, (along - across).to(kind), mask=inside)
    along, across = (second * cos).to(kind).to(tl.float32), (first * sin).to(kind).to(tl.float32)
    tl.store(target + HALF, (along + across).to(kind), mask=inside)
