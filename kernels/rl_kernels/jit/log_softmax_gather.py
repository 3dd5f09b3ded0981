"""Log-probabilities of a row's vocabulary, all of them or a few."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def exponentials(x: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The sum of exp(x - top) over one block."""
    return tl.sum(tl.exp(x - top), axis=0)


@triton.jit
def _normaliser(row: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The greatest number m of a row, and log(sum(exp(x - m))): each block's own sum, and then blocks in order."""
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    for first in range(0, WIDTH, BLOCK):
        at = first + column
        highest = tl.maximum(highest, tl.load(row + at, mask=at < WIDTH, other=LOWEST))
    top = tl.max(highest, axis=0)
    total = 0.0
    for first in range(0, WIDTH, BLOCK):
        at = first + column
        total += exponentials(tl.load(row + at, mask=at < WIDTH, other=LOWEST), top)
    return top, tl.log(total)


@triton.jit
def log_softmax(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Program n does row n of `[N, WIDTH]`."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    top, log_total = _normaliser(x + row, WIDTH, BLOCK)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < WIDTH
        tl.store(out + row + at, tl.load(x + row + at, mask=inside, other=0.0) - top - log_total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def gather_log_probs(
    x: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
) -> None:
    """Program n does row n: out `[N, count]` at ids `[N, count]`. An id outside of the row gets NaN."""
    row = tl.program_id(0).to(tl.int64)
    source = x + row * WIDTH
    top, log_total = _normaliser(source, WIDTH, BLOCK)
    for first in range(0, count, BLOCK_IDS):
        at = first + tl.arange(0, BLOCK_IDS)
        chosen = tl.load(ids + row * count + at, mask=at < count, other=0)
        known = (chosen >= 0) & (chosen < WIDTH)
        found = tl.load(source + chosen, mask=known & (at < count), other=float("nan"))
        tl.store(out + row * count + at, found - top - log_total, mask=at < count)
