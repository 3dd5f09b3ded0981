"""Attention over paged keys and values: in one program a block of queries, or split over a long context and merged.

Both ways take the same steps in the same order. Keys are cut into tiles from position 0 on, so many tiles make a
split, a split is summed up online by itself, and splits are merged one after the other. A tile or a split that a row
can't see leaves its numbers as they are, bit for bit.

No sum is left to a layout of threads. Each, that of a row's probabilities too, is a matrix product over a tile's keys;
everything else is elementwise, or a maximum. So a block may have any number of rows and warps, as long as the device's
matrix instructions for small and large blocks add up alike, which certification finds out.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16)
FLOOR = tl.constexpr(-1.0e30)  # below every score, and finite: the difference of two is a number
SMALL = tl.constexpr(16)  # rows of a block that hardly waits for arithmetic
SUMS = tl.constexpr(16)  # columns of ones that probabilities are multiplied with: a matrix product has no fewer


@triton.jit
def _merged(
    top: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    top_2: tl.tensor,
    total_2: tl.tensor,
    weighted_2: tl.tensor,
    SCALE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What was merged so far, and the next split: greatest products `[R]`, sums `[R]`, weighted values `[R, D]`."""
    highest = tl.maximum(top, top_2)
    old, new = tl.exp2((top - highest) * SCALE), tl.exp2((top_2 - highest) * SCALE)
    return highest, total * old + total_2 * new, weighted * old[:, None] + weighted_2 * new[:, None]


@triton.jit
def _divided(weighted: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Zeros for a row that saw no key."""
    seen = total > 0.0
    return tl.where(seen[:, None], weighted / tl.where(seen, total, 1.0)[:, None], 0.0)


@triton.jit
def _pages(pages: tl.tensor, key: tl.tensor, limit: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """The pages that hold the keys at positions `key`; 0 from `limit` on."""
    return tl.load(pages + key // PAGE, mask=key < limit, other=0)


@triton.jit
def _tiles(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    page: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    limit: tl.tensor,
    merged_top: tl.tensor,
    merged_total: tl.tensor,
    merged: tl.tensor,
    top: tl.tensor,
    totals: tl.tensor,
    weighted: tl.tensor,
    MASKED: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    SLOT: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The tiles of keys from `first` to `end`, for queries `[ROWS, BLOCK_D]` at `position` `[ROWS]`: what was merged
    of whole splits before, the split in which they begin, and the page of the first tile's keys `[TILE]`, become those
    behind the last tile.

    One loop over all splits, so that keys and values of the next one are on their way while one is merged; pages, up to
    `limit`, are read a tile ahead, so that keys and values never wait for them. MASKED: some row may not see all keys.
    """
    column, within = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    ones = tl.full([TILE, SUMS], 1.0, keys.dtype.element_ty)
    for tile in range(first, end, TILE):
        if tile % SPLIT == 0:
            merged_top, merged_total, merged = _merged(
                merged_top, merged_total, merged, top, tl.max(totals, axis=1), weighted, SCALE
            )
            top, totals, weighted = _nothing(q.shape[0], BLOCK_D)
        key = tile + within
        place = (page.to(tl.int64) * PAGE + key % PAGE)[:, None] * SLOT + column[None, :]
        page = _pages(pages, key + TILE, limit, PAGE)
        if MASKED:
            inside = (key < end)[:, None] & (column < HEAD_DIM)[None, :]
            k = tl.load(keys + place, mask=inside, other=0.0)
            v = tl.load(values + place, mask=inside, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(keys + place, mask=(column < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + place, mask=(column < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys + place)
            v = tl.load(values + place)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = key[None, :] <= position[:, None]
            products = tl.where(seen, products, FLOOR)
        highest = tl.maximum(top, tl.max(products, axis=1))
        p = tl.exp2(tl.fma(products, SCALE, -(highest * SCALE)[:, None]))
        if MASKED:
            p = tl.where(seen, p, 0.0)
        p = p.to(v.dtype)
        old = tl.exp2((top - highest) * SCALE)
        totals = tl.dot(p, ones, totals * old[:, None], input_precision="ieee")
        weighted = tl.dot(p, v, weighted * old[:, None], input_precision="ieee")
        top = highest
    return merged_top, merged_total, merged, top, totals, weighted, page


@triton.jit
def _nothing(ROWS: tl.constexpr, BLOCK_D: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A split before its first key: greatest products `[ROWS]`, sums `[ROWS, SUMS]`, weighted values
    `[ROWS, BLOCK_D]`."""
    top, totals = tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS, SUMS], tl.float32)
    return top, totals, tl.zeros([ROWS, BLOCK_D], tl.float32)


@triton.jit(do_not_specialize=["pages_row", "query_row", "query_head", "first_sequence", "fewest", "most"])
def paged_attention(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    pages_row: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    first_sequence: tl.tensor,
    fewest: tl.tensor,
    most: tl.tensor,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (b, h, i): the b-th last block of queries of sequence first_sequence + i, for the SHARED heads that read
    kv head h. Sequences with less than `fewest` or more than `most` queries are left to another launch.

    A block's rows are ROWS / BLOCK_SHARED tokens with BLOCK_SHARED heads each. Those that see most keys begin first.
    Strides of query come in units of UNIT elements.
    """
    kv_head, sequence = tl.program_id(1), first_sequence + tl.program_id(2)
    TOKENS: tl.constexpr = ROWS // BLOCK_SHARED
    start, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    queries = tl.load(starts + sequence + 1) - start
    block = tl.cdiv(queries, TOKENS) - 1 - tl.program_id(0)
    if (block >= 0) & (queries >= fewest) & (queries <= most):
        row = tl.arange(0, ROWS)
        token, shared = block * TOKENS + row // BLOCK_SHARED, row % BLOCK_SHARED
        real = (token < queries) & (shared < SHARED)
        position = tl.where(real, length - queries + token, -1)
        lowest = length - queries + block * TOKENS
        end = tl.minimum(length, lowest + TOKENS)
        head = kv_head * SHARED + shared
        column = tl.arange(0, BLOCK_D)
        inside = real[:, None] & (column < HEAD_DIM)[None, :]
        at = (start + token).to(tl.int64)
        source = query + (at * query_row + head * query_head)[:, None] * UNIT + column[None, :]
        q = tl.load(source, mask=inside, other=0.0)
        pages += sequence.to(tl.int64) * pages_row
        SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
        keys += kv_head * HEAD_DIM
        values += kv_head * HEAD_DIM
        top, totals, weighted = _nothing(ROWS, BLOCK_D)
        merged_top, merged_total, merged = top, tl.max(totals, axis=1), weighted
        page = _pages(pages, tl.arange(0, TILE), end, PAGE)
        seen_by_all = 0
        if ROWS > SMALL:  # without masks as far as may be; blocks of single tokens wait for memory, in one loop
            seen_by_all = tl.maximum(lowest + 1, 0) // TILE * TILE
            merged_top, merged_total, merged, top, totals, weighted, page = _tiles(
                q, keys, values, pages, page, position, 0, seen_by_all, end,
                merged_top, merged_total, merged, top, totals, weighted, False,
                SCALE, PAGE, SLOT, TILE, SPLIT, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        merged_top, merged_total, merged, top, totals, weighted, page = _tiles(
            q, keys, values, pages, page, position, seen_by_all, end, end,
            merged_top, merged_total, merged, top, totals, weighted, True,
            SCALE, PAGE, SLOT, TILE, SPLIT, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        _, total, weighted = _merged(merged_top, merged_total, merged, top, tl.max(totals, axis=1), weighted, SCALE)
        target = out + (at * (KV_HEADS * SHARED) + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, _divided(weighted, total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pages_row", "query_row", "query_head", "splits"])
def attend_splits(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    lengths: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    parts: tl.tensor,
    pages_row: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    splits: tl.tensor,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (i, h, s): the i-th split of sequence s, which has one query, for the heads that read kv head h.

    Leaves tops, totals `[S, splits, heads]` and parts `[S, splits, heads, HEAD_DIM]`; those behind the context are
    left as they were.
    """
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first = split * SPLIT
    if first < length:
        row = tl.arange(0, ROWS)
        shared = row % BLOCK_SHARED
        real = (row < BLOCK_SHARED) & (shared < SHARED)
        position = tl.where(real, length - 1, -1)
        head = kv_head * SHARED + shared
        column = tl.arange(0, BLOCK_D)
        inside = real[:, None] & (column < HEAD_DIM)[None, :]
        own = sequence.to(tl.int64)
        source = query + (own * query_row + head * query_head)[:, None] * UNIT + column[None, :]
        q = tl.load(source, mask=inside, other=0.0)
        SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
        pages += own * pages_row
        end = tl.minimum(first + SPLIT, length)
        page = _pages(pages, first + tl.arange(0, TILE), end, PAGE)
        top, sums, weighted = _nothing(ROWS, BLOCK_D)
        _, _, _, top, sums, weighted, _ = _tiles(
            q, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, pages, page, position, first, end, end,
            top, tl.max(sums, axis=1), weighted, top, sums, weighted, True,
            SCALE, PAGE, SLOT, TILE, SPLIT, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        place = (own * splits + split) * (KV_HEADS * SHARED) + head
        tl.store(tops + place, top, mask=real)
        tl.store(totals + place, tl.max(sums, axis=1), mask=real)
        tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], weighted, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    lengths: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (h, s): the splits of sequence s for the heads that read kv head h, in order: out `[S, heads, D]`."""
    kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    shared, column = tl.arange(0, BLOCK_SHARED), tl.arange(0, BLOCK_D)
    real = shared < SHARED
    head = kv_head * SHARED + shared
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    top = tl.full([BLOCK_SHARED], FLOOR, tl.float32)
    total = tl.zeros([BLOCK_SHARED], tl.float32)
    weighted = tl.zeros([BLOCK_SHARED, BLOCK_D], tl.float32)
    for split in range(0, tl.cdiv(length, SPLIT)):
        place = (sequence * splits + split) * (KV_HEADS * SHARED) + head
        top_2 = tl.load(tops + place, mask=real, other=FLOOR)
        total_2 = tl.load(totals + place, mask=real, other=0.0)
        weighted_2 = tl.load(parts + place[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
        top, total, weighted = _merged(top, total, weighted, top_2, total_2, weighted_2, SCALE)
    target = out + (sequence * (KV_HEADS * SHARED) + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(target, _divided(weighted, total).to(out.dtype.element_ty), mask=inside)
