"""Rows times the matrix of the expert that each goes to, in tiles of rows of one expert."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.rows import silu


@triton.jit
def _tile(
    counts: tl.tensor, tile: tl.tensor, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The tile's expert (none if it is not below EXPERTS), where its rows begin among all, and how many are left from
    there on."""
    index = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts + index, mask=index < EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    done = (tile - tl.sum(tl.where(index < expert, tiles, 0), axis=0)) * ROWS
    first = tl.sum(tl.where(index < expert, count, 0), axis=0)
    return expert, first + done, tl.sum(tl.where(index == expert, count, 0), axis=0) - done


@triton.jit
def grouped_linear(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    EACH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    QUANTISED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Program (c, t) does the c-th COLUMNS of the t-th tile; there may be fewer tiles than programs.

    GATED: x's rows are gathered, gate and up alternate in the columns, and `silu(gate) * up` is written in the order of
    places; else x's rows are in that order, and results are written to their places.
    """
    expert, first, left = _tile(counts, tl.program_id(1), EXPERTS, BLOCK_EXPERTS, ROWS)
    if expert >= EXPERTS:
        return
    row = tl.arange(0, ROWS)
    inside = row < left
    place = tl.load(order + first + row, mask=inside, other=0)
    source = (place // EACH if GATED else first + row).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = tl.minimum(column % 2 * (N // 2) + column // 2 if GATED else column, N - 1)
    weight_row = expert.to(tl.int64) * N + weight_row
    depth = tl.arange(0, DEPTH)
    x_at = x + source[:, None] * K + depth[None, :]
    weight_at = weight + weight_row[None, :] * K + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K, DEPTH):
        if K % DEPTH == 0:
            part = tl.load(x_at + k, mask=inside[:, None], other=0.0)
            matrix = tl.load(weight_at + k)
        else:
            part = tl.load(x_at + k, mask=inside[:, None] & (k + depth < K)[None, :], other=0.0)
            matrix = tl.load(weight_at + k, mask=(k + depth < K)[:, None], other=0.0)
        total = tl.dot(part, matrix.to(x.dtype.element_ty), total, input_precision="ieee")
    if QUANTISED:
        total *= tl.load(scales + weight_row)[None, :]
    y = total.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [ROWS, COLUMNS // 2, 2]))
        activated = silu(gate.to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
        y = (activated * up.to(tl.float32)).to(out.dtype.element_ty)
        half = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        at = out + (first + row).to(tl.int64)[:, None] * (N // 2) + half[None, :]
        tl.store(at, y, mask=inside[:, None] & (half < N // 2)[None, :])
    else:
        at = out + place.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(at, y, mask=inside[:, None] & (column < N)[None, :])
