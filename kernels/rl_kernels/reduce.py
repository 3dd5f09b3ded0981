"""Sums over a sample's elements in one fixed order, whatever the batch and the thread count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 64  # numbers that one addition stage puts together


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over all dimensions but the first: x `[B, ...]`, result `[B]`.

    Stage by stage with a fixed split, so that row i of the result has the same bits alone and in any batch, on any
    number of threads. (A full reduction, or one long row, is split by thread.)
    """
    flat = x.reshape(x.shape[0], -1)
    while flat.shape[1] > 1:
        short = -flat.shape[1] % GROUP
        flat = (F.pad(flat, (0, short)) if short else flat).reshape(x.shape[0], -1, GROUP).sum(-1)
    return flat[:, 0]


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """`row_sum` over the element count: x `[B, ...]`, result `[B]`."""
    return row_sum(x) / (x.numel() // x.shape[0])


def folded_mean(x: torch.Tensor, *, keepdim: bool = False) -> torch.Tensor:
    """Mean over the last dimension, x `[..., K]`, in the order of `row_sum`: for devices on which the library's order
    depends on how many rows there are."""
    mean = row_mean(x.reshape(-1, x.shape[-1])).reshape(x.shape[:-1])
    return mean.unsqueeze(-1) if keepdim else mean
