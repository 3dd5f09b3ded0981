"""Gumbel noise and the largest sum, a block of a row at a time."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))
BELOW_ONE = tl.constexpr(1 - 2.0**-24)
SMALL = tl.constexpr(2.0**-7)


@triton.jit
def _finalised(x: tl.tensor) -> tl.tensor:
    """murmur3's fmix32 of uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full(x.shape, 0x85EBCA6B, tl.uint32)
    x = x ^ (x >> 13)
    x = x * tl.full(x.shape, 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _exponential(u: tl.tensor) -> tl.tensor:
    """-log(1 - u). The series for small u, of which 1 - u would lose what matters."""
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return tl.where(u < SMALL, series, -tl.log(1.0 - u))


@triton.jit
def counted(token: tl.tensor, key: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Numbers between 1 and 2^32, functions of (key, token)."""
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits = _finalised(_finalised((token.to(tl.uint32) * tl.full([BLOCK], 0x9E3779B1, tl.uint32)) ^ low) ^ high)
    return bits.to(tl.float32) + 1.0


@triton.jit
def noisy(score: tl.tensor, token: tl.tensor, key: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """score + Gumbel noise, which is a function of (key, token)."""
    uniform = tl.minimum(counted(token, key, BLOCK) * 2.3283064365386963e-10, BELOW_ONE)
    return score - tl.log(_exponential(uniform))


@triton.jit
def gumbel_argmax(
    scores: tl.tensor,
    keys: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (n, b): of row n's block b, the largest sum of score and noise, and its token."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * WIDTH + token, mask=token < WIDTH, other=LOWEST)
    total = noisy(score, token, tl.load(keys + row), BLOCK)
    total = tl.where((token < WIDTH) & (total == total), total, LOWEST)  # what is no number is no place beyond the row
    at = tl.argmax(total, axis=0)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, tl.max(total, axis=0))
    tl.store(tokens + place, (block * BLOCK + at).to(tl.int64))
