"""Sums over a sample's elements in one fixed order, whatever the batch and the thread count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 64  # elements that the first stage adds; the second stage adds the groups


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over all dimensions but the first: x `[B, ...]`, result `[B]`.

    Two stages with a fixed split, so that row i of the result has the same bits alone and in any batch, on any number
    of threads. (A full reduction splits by thread.)
    """
    flat = x.reshape(x.shape[0], -1)
    short = -flat.shape[1] % GROUP
    if short:
        flat = F.pad(flat, (0, short))
    return flat.reshape(x.shape[0], -1, GROUP).sum(-1).sum(-1)


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """`row_sum` over the element count: x `[B, ...]`, result `[B]`."""
    return row_sum(x) / (x.numel() // x.shape[0])
