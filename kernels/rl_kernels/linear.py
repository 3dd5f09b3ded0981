"""Linear layers whose rows don't see each other.

Libraries choose another kernel, or another split of the work over threads, for a matrix of few rows, so that a row's
bits depend on how many rows stand beside it. Three habits remove that: the input is always a contiguous matrix, its row
count is a multiple of `ROWS` (and the weight has at least that many), and on a CPU no product is so long that its sum
would be split over threads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = 16  # fp32: from 4 rows a thread gets, a row's bits stop changing; bf16: threads must not get an odd row
MAX_CPU_K = 512  # fp32 on CPU: from K = 1024 on, few rows make the library split the sum over its threads


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, row by row: x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`.

    Row i of the result has the same bits whatever the other rows are and however many there are.
    """
    rows, n = x.reshape(-1, x.shape[-1]), weight.shape[0]
    count = rows.shape[0]
    short = -count % ROWS
    rows = F.pad(rows, (0, 0, 0, short)) if short else rows.contiguous()
    if n < ROWS:
        weight = F.pad(weight, (0, 0, 0, ROWS - n))
        bias = None if bias is None else F.pad(bias, (0, ROWS - n))
    long = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.shape[1] > MAX_CPU_K
    y = _in_pieces(rows, weight, bias) if long else F.linear(rows, weight, bias)
    return y[:count, :n].reshape(*x.shape[:-1], n)


def _in_pieces(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product as a sum over pieces of K, added in order."""
    pieces = zip(rows.split(MAX_CPU_K, dim=1), weight.split(MAX_CPU_K, dim=1), strict=True)
    first, *rest = pieces
    y = F.linear(*first, bias)
    for piece in rest:
        y = y + F.linear(*piece)
    return y
