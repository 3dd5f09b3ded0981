"""The rows of a decoding step between two forwards: integers, some rows a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """splitmix64's step of uint64."""
    x = x + tl.full(x.shape, 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full(x.shape, 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full(x.shape, 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["pages_row", "rows"])
def place_rows(
    positions: tl.tensor,
    lengths: tl.tensor,
    pages: tl.tensor,
    seeds: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    pages_row: tl.tensor,
    rows: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program i does BLOCK of the rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = tl.load(lengths + row, mask=inside, other=0) > 0
    position = tl.load(positions + row, mask=inside, other=0)
    page = tl.load(pages + row.to(tl.int64) * pages_row + position // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(slots + row, tl.where(live, page * PAGE + position % PAGE, -1), mask=inside)
    key = tl.load(seeds + row, mask=inside, other=0) ^ (position + live.to(tl.int64))
    tl.store(keys + row, _mixed(key.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def advance_rows(
    tokens: tl.tensor,
    drawn: tl.tensor,
    positions: tl.tensor,
    lengths: tl.tensor,
    results: tl.tensor,
    log_probs: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program i does BLOCK of the rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    length = tl.load(lengths + row, mask=inside, other=0)
    live = length > 0
    token = tl.load(drawn + row, mask=inside, other=0)
    tl.store(tokens + row, tl.where(live, token, 0), mask=inside)
    tl.store(positions + row, tl.load(positions + row, mask=inside, other=0) + live.to(tl.int64), mask=inside)
    tl.store(lengths + row, length + live.to(tl.int32), mask=inside)
    tl.store(results + row, token.to(tl.float64), mask=inside)
    tl.store(results + rows + row, tl.load(log_probs + row, mask=inside, other=0.0).to(tl.float64), mask=inside)
