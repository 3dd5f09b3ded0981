"""Copies of tokens into memory of other devices, and the meeting of all of them. Every program writes to one rank."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

UNIT = tl.constexpr(16)
POLLS = tl.constexpr(256)  # of a flag, between two looks at the clock


NUMBERS = [
    *("batch_stride", "head_stride", "token_stride"),
    *("which", "rank", "batch", "heads", "mine"),
    *("share", "count", "second_share", "second_count", "timeout_ns"),
]  # they change from call to call, and no kernel is to be compiled for one of their values


@triton.jit
def _of_rank(ranks: tl.tensor, rank: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Where that rank's buffer begins, as a pointer of `like`'s type."""
    return tl.multiple_of(tl.load(ranks + rank).to(like.dtype), 16)


@triton.jit(do_not_specialize=NUMBERS)
def push_heads(
    x: tl.tensor,
    ranks: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    which: tl.tensor,
    rank: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    share: tl.tensor,
    count: tl.tensor,
    second_share: tl.tensor,
    second_count: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, h, b): ROWS of this rank's tokens of head h of sample b, to the rank that attends with that head, in
    whose buffer `[n, batch, heads / SIZE, tokens, WIDTH]` x is tensor `which`.

    share, count: tokens of the first stream on each rank, and on all together; those of the second one lie behind it.
    Strides come in units of UNIT elements.
    """
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    mine = heads // SIZE
    target = (which * batch + sample) * mine + head % mine
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = token < share
    index = tl.where(first, rank * share + token, rank * second_share + token - share)
    real = tl.where(first, index < count, (index < second_count) & (token < share + second_share))
    place = tl.where(first, index, count + index)
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < WIDTH)[None, :]
    source = x + (sample * batch_stride + head.to(tl.int64) * head_stride) * UNIT
    row = token.to(tl.int64) * token_stride * UNIT
    found = tl.load(source + row[:, None] + column[None, :], mask=inside)
    tokens = (count + second_count).to(tl.int64)
    there = (target * tokens + place) * WIDTH
    tl.store(_of_rank(ranks, head // mine, x) + there[:, None] + column[None, :], found, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def push_tokens(
    x: tl.tensor,
    ranks: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    rank: tl.tensor,
    mine: tl.tensor,
    share: tl.tensor,
    count: tl.tensor,
    second_share: tl.tensor,
    second_count: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, to, h): of one sample's head h, `h = sample * mine + head`, ROWS of the tokens that rank `to` has
    asked for, into its buffer `[batch, share + second_share, SIZE * mine, WIDTH]`. Tokens that don't exist are zeros.

    Strides as in `push_heads`; x `[batch, mine, count + second_count, WIDTH]`.
    """
    to, sample, head = tl.program_id(1), (tl.program_id(2) // mine).to(tl.int64), tl.program_id(2) % mine
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = token < share
    wanted = token < share + second_share
    index = tl.where(first, to * share + token, to * second_share + token - share)
    real = tl.where(first, index < count, (index < second_count) & wanted)
    place = tl.where(first, index, count + index)
    column = tl.arange(0, BLOCK)
    wide = (column < WIDTH)[None, :]
    source = x + (sample * batch_stride + head.to(tl.int64) * head_stride) * UNIT
    row = place.to(tl.int64) * token_stride * UNIT
    found = tl.load(source + row[:, None] + column[None, :], mask=real[:, None] & wide, other=0.0)
    there = ((sample * (share + second_share) + token) * (SIZE * mine) + rank * mine + head) * WIDTH
    target = _of_rank(ranks, to, x) + there[:, None] + column[None, :]
    tl.store(target, found, mask=wanted[:, None] & wide)


@triton.jit(do_not_specialize=NUMBERS)
def meet(
    flags: tl.tensor, turns: tl.tensor, stop: tl.tensor, rank: tl.tensor, timeout_ns: tl.tensor, SIZE: tl.constexpr
) -> None:
    """One program: says to every rank that this one has come, and waits until all have.

    flags `[SIZE]`: addresses of each rank's flags, int32 `[SIZE]`, at r the turn that rank r has come to. turns
    int32 `[2]`: this rank's turn, and whether it has left one without the others, as it does after `timeout_ns`. Then
    it comes to none any more: it waits for nobody, and the others notice. stop int32 `[2]`, host memory: whoever sets
    the first lets this rank leave at once; the second is set here if it has left.
    """
    if tl.load(turns + 1) == 0:
        _meet(flags, turns, stop, rank, timeout_ns, SIZE)


@triton.jit
def _meet(
    flags: tl.tensor, turns: tl.tensor, stop: tl.tensor, rank: tl.tensor, timeout_ns: tl.tensor, SIZE: tl.constexpr
) -> None:
    turn = tl.load(turns) + 1
    for other in range(SIZE):
        there = tl.load(flags + other).to(turns.dtype)
        tl.atomic_xchg(there + rank, turn, sem="release", scope="sys")
    own = tl.load(flags + rank).to(turns.dtype)
    began = globaltimer()
    for other in range(SIZE):
        seen = tl.atomic_add(own + other, 0, sem="acquire", scope="sys")
        polls = 0
        while turn - seen > 0:  # turns wrap around
            seen = tl.atomic_add(own + other, 0, sem="acquire", scope="sys")
            polls += 1
            if polls == POLLS:
                polls = 0
                stopped = tl.load(stop, volatile=True)
                if (stopped != 0) | (globaltimer() - began > timeout_ns):
                    tl.store(turns + 1, 1)
                    tl.store(stop + 1, 1)
                    seen = turn
    tl.store(turns, turn)
