"""Passes over the bytes of many tensors. Each program does one block, whose place is in a table of addresses."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks"])
def row_sums(
    table: tl.tensor,
    factors: tl.tensor,
    sums: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """Program n multiplies its up to ROWS rows of bytes by the factors, which lie `[COLUMNS, ROW]`.

    table `[3, blocks]`: the address of a block, its bytes, and its first row in sums `[rows, COLUMNS]`.
    """
    block = tl.program_id(0)
    data = tl.multiple_of(tl.load(table + block).to(tl.pointer_type(tl.int8)), 16)
    count = tl.load(table + blocks + block)
    first = tl.load(table + 2 * blocks + block)
    row, byte, column = tl.arange(0, ROWS), tl.arange(0, SLICE), tl.arange(0, PADDED)
    offset = row[:, None] * ROW + byte[None, :]
    place = column[None, :] * ROW + byte[:, None]
    found = tl.zeros((ROWS, PADDED), dtype=tl.int32)
    if count == ROWS * ROW:
        for start in tl.range(0, ROW, SLICE):
            x = tl.load(data + offset + start)
            y = tl.load(factors + place + start, mask=column[None, :] < COLUMNS, other=0)
            found = tl.dot(x, y, found, out_dtype=tl.int32)
    else:
        for start in tl.range(0, ROW, SLICE):
            x = tl.load(data + offset + start, mask=offset + start < count, other=0)
            y = tl.load(factors + place + start, mask=column[None, :] < COLUMNS, other=0)
            found = tl.dot(x, y, found, out_dtype=tl.int32)
    inside = (row[:, None] * ROW < count) & (column[None, :] < COLUMNS)
    tl.store(sums + (first + row[:, None]) * COLUMNS + column[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def replace(
    table: tl.tensor,
    bad: tl.tensor,
    blocks: tl.tensor,
    ITEM: tl.constexpr,
    ITEMS: tl.constexpr,
    PART: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """Program n copies its up to ITEMS integers of type ITEM from live to old (if KEEP), and from new to live.

    table `[7, blocks]`: the addresses of live, new and old, the number of items, the tensor's place in `bad`, and mask
    and pattern: `bad` becomes 1 where an item of new, masked, is the pattern.
    """
    block = tl.program_id(0)
    live = tl.multiple_of(tl.load(table + block).to(tl.pointer_type(ITEM)), 16)
    new = tl.multiple_of(tl.load(table + blocks + block).to(tl.pointer_type(ITEM)), 16)
    old = tl.multiple_of(tl.load(table + 2 * blocks + block).to(tl.pointer_type(ITEM)), 16)
    count = tl.load(table + 3 * blocks + block)
    tensor = tl.load(table + 4 * blocks + block)
    mask = tl.load(table + 5 * blocks + block).to(ITEM)
    pattern = tl.load(table + 6 * blocks + block).to(ITEM)
    lane = tl.arange(0, PART)
    hits = tl.zeros((PART,), dtype=tl.int32)
    if count == ITEMS:
        for start in tl.range(0, ITEMS, PART):
            item = start + lane
            came = tl.load(new + item)
            if KEEP:
                tl.store(old + item, tl.load(live + item))
            tl.store(live + item, came)
            hits = hits | ((came & mask) == pattern).to(tl.int32)
    else:
        for start in tl.range(0, tl.cast(count, tl.int32), PART):
            item = start + lane
            inside = item < count
            came = tl.load(new + item, mask=inside, other=0)
            if KEEP:
                tl.store(old + item, tl.load(live + item, mask=inside, other=0), mask=inside)
            tl.store(live + item, came, mask=inside)
            hits = hits | ((came & mask) == pattern).to(tl.int32)
    if tl.max(hits, axis=0) > 0:
        tl.store(bad + tensor, 1)
