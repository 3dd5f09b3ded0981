"""A token of each row, and its log-probability, without writing down the other ones': three passes over blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.gumbel_argmax import noisy
from rl_kernels.jit.log_softmax_gather import exponentials

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def best_of_blocks(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    greedy: tl.tensor,
    tops: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (n, b): of row n's block b the greatest number, the greatest sum with noise, and the token of that."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * WIDTH + token, mask=token < WIDTH, other=LOWEST)
    x = tl.math.div_rn(x, tl.load(temperatures + row))
    place = row * tl.num_programs(1) + block
    tl.store(tops + place, tl.max(x, axis=0))
    if tl.load(greedy + row) == 0:
        x = noisy(x, token, tl.load(keys + row), BLOCK)
    x = tl.where((token < WIDTH) & (x == x), x, LOWEST)  # what is no number is no place beyond the row
    tl.store(best + place, tl.max(x, axis=0))
    tl.store(tokens + place, (block * BLOCK + tl.argmax(x, axis=0)).to(tl.int64))


@triton.jit
def totals_of_blocks(
    logits: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Program (n, b): of row n's block b, the sum of exp(x - the row's greatest number)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.num_programs(1)
    at = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(tops + row * count + at, mask=at < count, other=LOWEST), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * WIDTH + token, mask=token < WIDTH, other=LOWEST)
    x = tl.math.div_rn(x, tl.load(temperatures + row))
    tl.store(totals + row * count + block, exponentials(x, top))


@triton.jit(do_not_specialize=["count"])
def draw_tokens(
    logits: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    drawn: tl.tensor,
    log_probs: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Program n: row n's token, the best of its blocks' (of equals the first), and that token's log-probability."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    known = at < count
    top = tl.max(tl.load(tops + row * count + at, mask=known, other=LOWEST), axis=0)
    winner = tl.argmax(tl.load(best + row * count + at, mask=known, other=LOWEST), axis=0)
    token = tl.load(tokens + row * count + winner)
    total = 0.0
    for block in range(0, count):
        total += tl.load(totals + row * count + block)
    x = tl.math.div_rn(tl.load(logits + row * WIDTH + token), tl.load(temperatures + row))
    tl.store(drawn + row, token)
    tl.store(log_probs + row, x - top - tl.log(total))
