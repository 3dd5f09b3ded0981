"""Tokens for heads between devices that can write each other's memory: one kernel writes every element to where the
rank that needs it reads it, and one lets all ranks meet. Copies of bytes, so there is nothing to certify.

A buffer is one of each rank's, all of one size; a kernel is given their addresses `[size]` (int64, on its device).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl_kernels.fused import block_of, launch, readable, units

ELEMENTS = 4096  # of a program's tokens


@dataclass(frozen=True)
class Streams:
    """How a rank's tokens lie: `share` of a first stream, of which all ranks together have `count`, and behind them
    those of a second one. All ranks have equal shares, padded at the last ones' ends."""

    share: int
    count: int
    second_share: int = 0
    second_count: int = 0

    @property
    def of_rank(self) -> int:
        """Tokens of a rank, its padding included."""
        return self.share + self.second_share

    @property
    def tokens(self) -> int:
        """True ones, of all ranks."""
        return self.count + self.second_count


def push_heads(x: torch.Tensor, ranks: torch.Tensor, streams: Streams, *, which: int, rank: int) -> None:
    """x `[B, H, tokens of this rank, D]` to every rank its heads of it: tensor `which` of its buffer
    `[n, B, H / size, tokens, D]`, in the order of one device and without padding."""
    from rl_kernels.jit.exchange import push_heads as kernel

    x = readable(x)
    batch, heads, _, width = x.shape
    rows = _rows(width)
    launch(
        kernel,
        (_blocks(streams.of_rank, rows), heads, batch),
        *(x, ranks, units(x, 0), units(x, 1), units(x, 2), which, rank, batch, heads),
        *_numbers(streams),
        **_shape(len(ranks), width, rows),
    )


def push_tokens(x: torch.Tensor, ranks: torch.Tensor, streams: Streams, *, rank: int) -> None:
    """x `[B, H / size, all tokens, D]` of this rank's heads to every rank its tokens of it: its heads in that rank's
    buffer `[B, tokens of a rank, H, D]`, with zeros for padding."""
    from rl_kernels.jit.exchange import push_tokens as kernel

    x = readable(x)
    batch, mine, _, width = x.shape
    rows = _rows(width)
    launch(
        kernel,
        (_blocks(streams.of_rank, rows), len(ranks), batch * mine),
        *(x, ranks, units(x, 0), units(x, 1), units(x, 2), rank, mine),
        *_numbers(streams),
        **_shape(len(ranks), width, rows),
    )


def meet(flags: torch.Tensor, turns: torch.Tensor, stop: torch.Tensor, *, rank: int, timeout_s: float) -> None:
    """What every rank launched before it is done, and seen by what this rank launches after it.

    flags `[size]`: addresses of each rank's `[size]` int32, zero at the start; turns int32 `[2]` on this device, zero
    at the start; stop int32 `[2]`, pinned: another thread sets the first to let this rank go; it then finds the second
    set, as after `timeout_s`. Later meetings end at once then, and the other ranks wait for this one in vain.
    """
    from rl_kernels.jit.exchange import meet as kernel

    with torch.cuda.device(turns.device):
        kernel[(1,)](flags, turns, stop, rank, int(timeout_s * 1e9), SIZE=len(flags), num_warps=1)


def _rows(width: int) -> int:
    return max(1, ELEMENTS // block_of(width))


def _blocks(tokens: int, rows: int) -> int:
    return -(-tokens // rows)


def _numbers(streams: Streams) -> tuple[int, ...]:
    return streams.share, streams.count, streams.second_share, streams.second_count


def _shape(size: int, width: int, rows: int) -> dict[str, Any]:
    block = block_of(width)
    return {"SIZE": size, "WIDTH": width, "ROWS": rows, "BLOCK": block, "block": rows * block}
