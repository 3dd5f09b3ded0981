"""Linear layers whose rows don't see each other.

Libraries choose another kernel, or another split of the work over threads, for a matrix of few rows, so that a row's
bits depend on how many rows stand beside it. There are several ways to prevent that; `certify` finds out which hold on
a device, and which of those is the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from rl_kernels.fused import FEW_ROWS

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

ROWS = 16  # fp32: from 4 rows a thread gets, a row's bits stop changing; bf16: threads must not get an odd row
TILE = 192
FEW = (16, 32, 48, 64, 80, 96, FEW_ROWS)  # numbers of rows to which fewer may be padded
WORTH = 1.15  # how much longer a product of fewer rows may take; GPU timings are as near as that
TIMED = 10  # calls
MAX_CPU_K = 512  # fp32 on CPU: from K = 1024 on, few rows make the library split the sum over its threads


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, row by row: x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`.

    Row i of the result has the same bits whatever the other rows are and however many there are (`padded_rows`).
    """
    return padded_rows(x, weight, bias)


def library_call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The library as it is, on a contiguous matrix of rows."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return F.linear(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])


def padded_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The library on a matrix of at least `ROWS` rows (on a CPU: of a multiple), and as many columns of the result.

    On a CPU a long fp32 product is added up from pieces, too short for its sum to be split over threads.
    """
    rows, n = x.reshape(-1, x.shape[-1]), weight.shape[0]
    count, on_cpu = rows.shape[0], x.device.type == "cpu"
    short = -count % ROWS if on_cpu else max(ROWS - count, 0)
    rows = F.pad(rows, (0, 0, 0, short)) if short else rows.contiguous()
    if n < ROWS:
        weight = F.pad(weight, (0, 0, 0, ROWS - n))
        bias = None if bias is None else F.pad(bias, (0, ROWS - n))
    long = on_cpu and rows.dtype == torch.float32 and rows.shape[1] > MAX_CPU_K
    y = _in_pieces(rows, weight, bias) if long else F.linear(rows, weight, bias)
    return y[:count, :n].reshape(*x.shape[:-1], n)


def padded_to(sizes: tuple[int, ...]) -> Linear:
    """`padded_rows`, with fewer rows padded to the next of `sizes`, which rise. The bits are the same."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count = x.shape[:-1].numel()
        size = next((size for size in sizes if size >= count), count)
        if size == count:
            return padded_rows(x, weight, bias)
        rows = _with_rows_behind(x.reshape(-1, x.shape[-1]), size)
        return padded_rows(rows, weight, bias)[:count].reshape(*x.shape[:-1], weight.shape[0])

    return product


def _with_rows_behind(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The rows, and as many more as make `size`; what is in those, nobody sees. Nothing is copied where the memory goes
    on behind them, as behind `empty_rows`."""
    count, width = rows.shape
    end = (rows.storage_offset() + size * width) * rows.element_size()
    if rows.is_contiguous() and end <= rows.untyped_storage().nbytes():
        return rows.as_strided((size, width), (width, 1))
    wider = rows.new_empty(size, width)
    wider[:count].copy_(rows)
    return wider


@cache
def quick_sizes(k: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Of `FEW`, the numbers of rows whose product with a weight `[n, k]` takes no longer than one of more rows, as the
    library is set now. On an H200, without split-K, cuBLAS takes ten times as long for 16 to 64 rows of 3072 x 1024 as
    for 80, and for 16 rows of 9728 x 2560 as for 32."""
    if device.type != "cuda":
        return ()
    weight, x = (torch.zeros(rows, k, dtype=dtype, device=device) for rows in (n, FEW[-1]))
    found: list[int] = []
    best = float("inf")
    for rows in reversed(FEW):
        seconds = _seconds(x[:rows], weight)
        if seconds <= WORTH * best:
            found.append(rows)
        best = min(best, seconds)
    return tuple(reversed(found))


def _seconds(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of the quickest of a few rounds of calls."""
    found = float("inf")
    for _ in range(3):
        torch.cuda.synchronize(x.device)
        began = time.perf_counter()
        for _ in range(TIMED):
            F.linear(x, weight)
        torch.cuda.synchronize(x.device)
        found = min(found, time.perf_counter() - began)
    return found


def fixed_tiles(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The library on `TILE` rows at a time, always: one shape of product, whatever the batch. Slow, and certain."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    rows = F.pad(rows, (0, 0, 0, -count % TILE))
    y = torch.cat([F.linear(tile.contiguous(), weight, bias) for tile in rows.split(TILE)])
    return y[:count].reshape(*x.shape[:-1], weight.shape[0])


IMPLEMENTATIONS: dict[str, Linear] = {
    "library": library_call,
    "padded_rows": padded_rows,
    "fixed_tiles": fixed_tiles,
}


def _in_pieces(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product as a sum over pieces of K, added in order."""
    pieces = zip(rows.split(MAX_CPU_K, dim=1), weight.split(MAX_CPU_K, dim=1), strict=True)
    first, *rest = pieces
    y = F.linear(*first, bias)
    for piece in rest:
        y = y + F.linear(*piece)
    return y
