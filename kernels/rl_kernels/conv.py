"""Patch embeddings (convolutions whose stride is their kernel) as a row-invariant linear layer over patches."""

from __future__ import annotations

import torch

from rl_kernels.linear import linear


def is_patch_conv(
    weight: torch.Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...] | str,
    dilation: tuple[int, ...],
    groups: int,
) -> bool:
    """Whether the convolution cuts its input into patches that don't overlap."""
    kernel = tuple(weight.shape[2:])
    unpadded = padding == "valid" or (not isinstance(padding, str) and all(p == 0 for p in padding))
    return stride == kernel and unpadded and all(d == 1 for d in dilation) and groups == 1


def patch_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x `[B, C, H, W]`, weight `[N, C, p, q]`, result `[B, N, H // p, W // q]`: one row of the linear layer a patch."""
    batch, channels, height, width = x.shape
    n, _, p, q = weight.shape
    rows, cols = height // p, width // q
    patches = x[:, :, : rows * p, : cols * q].reshape(batch, channels, rows, p, cols, q).permute(0, 2, 4, 1, 3, 5)
    y = linear(patches.reshape(batch, rows * cols, channels * p * q), weight.reshape(n, -1), bias)
    return y.transpose(1, 2).reshape(batch, n, rows, cols)
