"""A token of each row, and its log-probability, without writing down the other ones': two passes over blocks of a row,
and one over few of them.

Two logarithms a token would take most of the time. With u in (0, 1) the noise is -log(-log(1 - u)), and no greater than
-log(u). The bits of a float, read as an integer, are 2^23 (127 + its binary logarithm), or up to 0.09 * 2^23 less. So a
product and a sum bound what a token can reach. The sum with noise itself is made in the blocks that the greatest one
may be in: one, or a few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.jit.gumbel_argmax import counted, noisy
from rl_kernels.jit.log_softmax_gather import exponentials

LOWEST = tl.constexpr(float("-inf"))
RUN = tl.constexpr(4)  # numbers in fp32 of a vector load
LOG_2 = tl.constexpr(0.6931471805599453)
OF_COUNTED = tl.constexpr(127 + 32)  # u is 2^-32 of a counted number
# What rounding may add to a sum beyond its bound: of the bound, and of everything else. A hundred times what it can be.
RELATIVE = tl.constexpr(2.0**-18)
ABSOLUTE = tl.constexpr(2.0**-9)


@triton.jit
def _logits(logits: tl.tensor, row: tl.tensor, token: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """A row's logits in fp32, and -inf behind its end.

    Read in runs of `RUN` whatever their dtype: a sum's order is the one in which its numbers lie over the threads, and
    those of a row in fp32 (`log_softmax_gather`) lie so.
    """
    at = tl.max_contiguous(row * WIDTH + token, RUN)
    return tl.load(logits + at, mask=token < WIDTH, other=LOWEST).to(tl.float32)


@triton.jit
def _tempered(x: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """x / temperature, rounded to the nearest."""
    if temperature != 1.0:
        x = tl.math.div_rn(x, temperature)
    return x


@triton.jit
def bounds_of_blocks(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    greedy: tl.tensor,
    tops: tl.tensor,
    bounds: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (n, b): of row n's block b the greatest number, and what no sum with noise exceeds."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = _logits(logits, row, token, WIDTH)
    temperature = tl.load(temperatures + row)
    top = tl.math.div_rn(tl.max(x, axis=0), temperature)  # the rounded quotients have the order of the numbers
    bound = top
    if tl.load(greedy + row) == 0:
        power = counted(token, tl.load(keys + row), BLOCK).to(tl.int32, bitcast=True).to(tl.float32)
        reached = tl.max(tl.fma(power, temperature * (-LOG_2 * 2.0**-23), x), axis=0)
        bound = tl.math.div_rn(reached, temperature) + OF_COUNTED * LOG_2
    place = row * tl.num_programs(1) + block
    tl.store(tops + place, top)
    tl.store(bounds + place, bound)


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
    x = _logits(logits, row, block * BLOCK + tl.arange(0, BLOCK), WIDTH)
    tl.store(totals + row * count + block, exponentials(_tempered(x, tl.load(temperatures + row)), top))


@triton.jit(do_not_specialize=["count"])
def draw_tokens(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    greedy: tl.tensor,
    tops: tl.tensor,
    bounds: tl.tensor,
    totals: tl.tensor,
    drawn: tl.tensor,
    log_probs: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Program n: row n's token, of the greatest sum (of equals the first), and that token's log-probability.

    Blocks are looked at by falling bounds, until no bound reaches the best sum.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(tops + row * count + at, mask=at < count, other=LOWEST), axis=0)
    left = tl.load(bounds + row * count + at, mask=at < count, other=LOWEST)
    temperature, key, plain = tl.load(temperatures + row), tl.load(keys + row), tl.load(greedy + row)
    best, token = tl.full([], LOWEST, tl.float32), tl.zeros([], tl.int32)
    bound = tl.max(left, axis=0)
    while bound + (tl.abs(bound) * RELATIVE + ABSOLUTE) >= best:
        block = tl.argmax(left, axis=0)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = _tempered(_logits(logits, row, tokens, WIDTH), temperature)
        if plain == 0:
            x = noisy(x, tokens, key, BLOCK)
        x = tl.where((tokens < WIDTH) & (x == x), x, LOWEST)
        found, place = tl.max(x, axis=0), block * BLOCK + tl.argmax(x, axis=0)
        token = tl.where((found > best) | ((found == best) & (place < token)), place, token)
        best = tl.maximum(best, found)
        left = tl.where(at == block, LOWEST, left)
        bound = tl.max(left, axis=0)
    total = 0.0
    for block in range(0, count):
        total += tl.load(totals + row * count + block)
    x = _tempered(tl.load(logits + row * WIDTH + token).to(tl.float32), temperature)
    tl.store(drawn + row, token.to(tl.int64))
    tl.store(log_probs + row, x - top - tl.log(total))
