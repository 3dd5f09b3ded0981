"""RMS norm over the channels of each position. x is `[samples, CHANNELS, positions]`, as for the group norm."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.rows import silu


@triton.jit(do_not_specialize=["units"])
def channel_norm(
    x: tl.tensor,
    gamma: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    units: tl.tensor,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNELS: tl.constexpr,
    UNIT: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Program (p, b) does BLOCK_P positions of sample b: each reads all of its channels once."""
    sample = tl.program_id(1).to(tl.int64)
    positions = units * UNIT
    channel = tl.arange(0, BLOCK_C)
    first, ahead = tl.program_id(0) * BLOCK_P, tl.arange(0, BLOCK_P)
    real = channel < CHANNELS
    if LAST:
        start = (sample * positions + first) * CHANNELS + channel
    else:
        start = (sample * CHANNELS + channel) * positions + first
    step = ahead * CHANNELS if LAST else ahead
    inside = real[:, None] & (ahead < positions - first)[None, :]
    value = tl.load((x + start)[:, None] + step[None, :], mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(value * value, axis=0)), EPS)
    factor = tl.load(gamma + channel, mask=real, other=0.0).to(tl.float32) * SCALE
    value = value / length[None, :] * factor[:, None]
    if BIAS:
        value += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[:, None]
    if SILU:
        value = silu(value)
    tl.store((out + start)[:, None] + step[None, :], value.to(out.dtype.element_ty), mask=inside)
