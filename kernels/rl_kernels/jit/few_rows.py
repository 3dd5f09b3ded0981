"""A linear layer of few rows: the weight is read once, by as many programs as it takes to read it fast."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
) -> None:
    """Program n: BLOCK of the WIDTH columns of out `[rows, WIDTH]` = x `[rows, DEPTH]` times weight `[WIDTH, DEPTH]`
    transposed. The sum goes along DEPTH in order, in fp32. WEIGHT_FIRST: the product is made transposed, which lets
    few rows use the instruction that wants 64 in its first operand."""
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK_DEPTH)
    real, inside = row < rows, column < WIDTH
    source, factor = x + row[:, None] * DEPTH + depth[None, :], weight + column.to(tl.int64)[:, None] * DEPTH + depth
    total = tl.zeros([BLOCK, BLOCK_ROWS] if WEIGHT_FIRST else [BLOCK_ROWS, BLOCK], tl.float32)
    for first in tl.range(0, DEPTH, BLOCK_DEPTH, num_stages=STAGES):
        known = (first + depth < DEPTH)[None, :]
        a = tl.load(source + first, mask=real[:, None] & known, other=0.0)
        b = tl.load(factor + first, mask=inside[:, None] & known, other=0.0)
        total = tl.dot(b, tl.trans(a), total) if WEIGHT_FIRST else tl.dot(a, tl.trans(b), total)
    if WEIGHT_FIRST:
        total = tl.trans(total)
    target = out + row[:, None] * WIDTH + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
