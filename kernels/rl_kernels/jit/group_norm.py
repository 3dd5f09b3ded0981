"""Group norm in three kernels: moments of each channel, piece by piece; of each group; then one product and one sum.

x is `[samples, CHANNELS, positions]`, its channels in front (`LAST` false) or innermost. Positions come in units of
UNIT elements, so that a kernel may rely on their alignment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.rows import silu


@triton.jit(do_not_specialize=["units", "tiles"])
def channel_moments(
    x: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    units: tl.tensor,
    tiles: tl.tensor,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Program (p, c, b) does piece p, `tiles` times BLOCK_P positions, of BLOCK_C channels of sample b.

    In means and squares `[samples, pieces, CHANNELS]` it leaves their means, and their sums of squared distances from
    those. What is summed are distances from a piece's first number: a large mean leaves digits for the variance.
    """
    piece, sample = tl.program_id(0), tl.program_id(2).to(tl.int64)
    positions = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = piece * tiles * BLOCK_P
    if LAST:
        start = x + (sample * positions + first) * CHANNELS + channel
    else:
        start = x + (sample * CHANNELS + channel) * positions + first
    real = channel < CHANNELS
    origin = tl.load(start, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_C, BLOCK_P), dtype=tl.float32)
    square = tl.zeros((BLOCK_C, BLOCK_P), dtype=tl.float32)
    for tile in tl.range(0, tiles):
        ahead = tile * BLOCK_P + tl.arange(0, BLOCK_P)
        inside = real[:, None] & (ahead < positions - first)[None, :]
        step = ahead * CHANNELS if LAST else ahead
        value = tl.load(start[:, None] + step[None, :], mask=inside, other=0.0).to(tl.float32)
        distance = tl.where(inside, value - origin[:, None], 0.0)
        total += distance
        square += distance * distance
    count = tl.minimum(tiles * BLOCK_P, positions - first).to(tl.float32)
    sum_ = tl.sum(total, axis=1)
    mean = sum_ / count
    target = (sample * tl.num_programs(0) + piece) * CHANNELS + channel
    tl.store(means + target, origin + mean, mask=real)
    tl.store(squares + target, tl.sum(square, axis=1) - sum_ * mean, mask=real)


@triton.jit(do_not_specialize=["positions", "pieces", "length"])
def group_factors(
    means: tl.tensor,
    squares: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    offsets: tl.tensor,
    positions: tl.tensor,
    pieces: tl.tensor,
    length: tl.tensor,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AFFINE: tl.constexpr,
) -> None:
    """Program (g, b) puts the pieces, of `length` positions each, of a group's WIDTH channels together.

    What is normed, weighted and shifted is x * factor + offset, of factors and offsets `[samples, CHANNELS]`.
    """
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece, lane = tl.arange(0, BLOCK_PIECES), tl.arange(0, BLOCK_D)
    channel = group * WIDTH + lane
    inside = (piece < pieces)[:, None] & (lane < WIDTH)[None, :]
    source = (sample * pieces + piece[:, None]) * CHANNELS + channel[None, :]
    mean = tl.load(means + source, mask=inside, other=0.0)
    square = tl.load(squares + source, mask=inside, other=0.0)
    count = tl.minimum(length, positions - piece * length).to(tl.float32)
    weighted = tl.where(inside, mean * count[:, None], 0.0)
    all_ = positions.to(tl.float32) * WIDTH
    centre = tl.sum(tl.sum(weighted, axis=1), axis=0) / all_
    distance = mean - centre
    apart = tl.where(inside, square + count[:, None] * distance * distance, 0.0)
    factor = tl.rsqrt(tl.sum(tl.sum(apart, axis=1), axis=0) / all_ + EPS) + tl.zeros((BLOCK_D,), dtype=tl.float32)
    offset = -centre * factor
    if AFFINE:
        factor *= tl.load(weight + channel, mask=lane < WIDTH, other=0.0).to(tl.float32)
        offset = tl.load(bias + channel, mask=lane < WIDTH, other=0.0).to(tl.float32) - centre * factor
    target = sample * CHANNELS + channel
    tl.store(factors + target, factor, mask=lane < WIDTH)
    tl.store(offsets + target, offset, mask=lane < WIDTH)


@triton.jit(do_not_specialize=["units"])
def scaled_channels(
    x: tl.tensor,
    factors: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    units: tl.tensor,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Program (p, c, b) does a block of positions, the last first: the cache still has those from their moments."""
    block, sample = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2).to(tl.int64)
    positions = units * UNIT
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, ahead = block * BLOCK_P, tl.arange(0, BLOCK_P)
    real = channel < CHANNELS
    factor = tl.load(factors + sample * CHANNELS + channel, mask=real, other=0.0)
    offset = tl.load(offsets + sample * CHANNELS + channel, mask=real, other=0.0)
    if LAST:
        start = (sample * positions + first) * CHANNELS + channel
    else:
        start = (sample * CHANNELS + channel) * positions + first
    step = ahead * CHANNELS if LAST else ahead
    inside = real[:, None] & (ahead < positions - first)[None, :]
    value = tl.load((x + start)[:, None] + step[None, :], mask=inside, other=0.0).to(tl.float32)
    value = value * factor[:, None] + offset[:, None]
    if SILU:
        value = silu(value)
    tl.store((out + start)[:, None] + step[None, :], value.to(out.dtype.element_ty), mask=inside)
