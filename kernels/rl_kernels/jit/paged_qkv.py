"""Queries, keys and values out of one projection: heads normed and turned, keys and values written to their slots."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16)


@triton.jit
def _over_heads(half: tl.tensor, HEADS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Pointers to half a head's numbers, the same for all heads: each thread loads what its own elements need."""
    return tl.broadcast_to(half[None, :], [HEADS, BLOCK])


@triton.jit
def _normed_and_turned(
    source: tl.tensor,
    inside: tl.tensor,
    weight: tl.tensor,
    cos_sin: tl.tensor,
    position: tl.tensor,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The two halves `[HEADS, BLOCK]` of heads that lie at source, in its dtype. All loads stand in front of what needs
    them; every factor and product is rounded to that dtype."""
    kind = source.dtype.element_ty
    column = tl.arange(0, BLOCK)
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factors = _over_heads(weight + column, HEADS, BLOCK)
        factor = tl.load(factors, mask=inside, other=0.0).to(tl.float32)
        factor_2 = tl.load(factors + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = _over_heads(cos_sin + position * (2 * HALF) + column, HEADS, BLOCK)
    cos = tl.load(turn, mask=inside, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(turn + HALF, mask=inside, other=0.0).to(kind).to(tl.float32)
    if NORM:
        mean_square = tl.sum(first * first + second * second, axis=1) * (1.0 / (2 * HALF))
        scale = tl.rsqrt(mean_square + EPS)[:, None]
        first = ((first * scale).to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * factor_2).to(kind).to(tl.float32)
    along, across = (first * cos).to(kind).to(tl.float32), (second * sin).to(kind).to(tl.float32)
    along_2, across_2 = (second * cos).to(kind).to(tl.float32), (first * sin).to(kind).to(tl.float32)
    return (along - across).to(kind), (along_2 + across_2).to(kind)


@triton.jit
def _store(target: tl.tensor, first: tl.tensor, second: tl.tensor, kept: tl.tensor, HALF: tl.constexpr) -> None:
    tl.store(target, first, mask=kept)
    tl.store(target + HALF, second, mask=kept)


@triton.jit(do_not_specialize=["qkv_row"])
def paged_qkv(
    qkv: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    qkv_row: tl.tensor,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """A row has programs for BLOCK_HEADS heads each, of its queries, of its keys and of its values. Heads are 2 * HALF
    wide; qkv's stride comes in units of UNIT elements, all else is contiguous."""
    WIDTH: tl.constexpr = 2 * HALF
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    row, block = (program // (QUERY_BLOCKS + 2 * KV_BLOCKS)).to(tl.int64), program % (QUERY_BLOCKS + 2 * KV_BLOCKS)
    position, slot = tl.load(positions + row).to(tl.int64), tl.load(slots + row).to(tl.int64)
    lane, column = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)
    source = qkv + row * qkv_row * UNIT
    if block < QUERY_BLOCKS:
        head = block * BLOCK_HEADS + lane
        place, inside = head[:, None] * WIDTH + column[None, :], (head < HEADS)[:, None] & (column < HALF)[None, :]
        first, second = _normed_and_turned(
            source + place, inside, query_weight, cos_sin, position, EPS, BLOCK_HEADS, HALF, BLOCK, NORM
        )
        _store(query + row * (HEADS * WIDTH) + place, first, second, inside, HALF)
    else:
        head = ((block - QUERY_BLOCKS) % KV_BLOCKS) * BLOCK_HEADS + lane
        place, inside = head[:, None] * WIDTH + column[None, :], (head < KV_HEADS)[:, None] & (column < HALF)[None, :]
        kept, target = inside & (slot >= 0), slot * (KV_HEADS * WIDTH) + place
        source += HEADS * WIDTH
        if block < QUERY_BLOCKS + KV_BLOCKS:
            first, second = _normed_and_turned(
                source + place, inside, key_weight, cos_sin, position, EPS, BLOCK_HEADS, HALF, BLOCK, NORM
            )
            _store(keys + target, first, second, kept, HALF)
        else:
            value = source + KV_HEADS * WIDTH + place
            _store(values + target, tl.load(value, mask=inside), tl.load(value + HALF, mask=inside), kept, HALF)
