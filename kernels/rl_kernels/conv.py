"""Convolutions: patch embeddings as a row-invariant linear layer, others by one library path for every batch size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from rl_kernels.linear import Linear, linear


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


def patch_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, linear: Linear = linear
) -> torch.Tensor:
    """x `[B, C, H, W]`, weight `[N, C, p, q]`, result `[B, N, H // p, W // q]`: one row of the linear layer a patch,
    which `linear` computes.

    In any number of dimensions: a video's x is `[B, C, F, H, W]`.
    """
    batch, channels = x.shape[:2]
    n, patch = weight.shape[0], weight.shape[2:]
    grid = [size // side for size, side in zip(x.shape[2:], patch, strict=True)]
    pairs = list(zip(grid, patch, strict=True))
    whole = x[(slice(None), slice(None), *(slice(count * side) for count, side in pairs))]
    split = whole.reshape(batch, channels, *(number for pair in pairs for number in pair))
    end = 2 + 2 * len(grid)
    patches = split.permute(0, *range(2, end, 2), 1, *range(3, end, 2))
    y = linear(patches.reshape(batch, math.prod(grid), channels * math.prod(patch)), weight.reshape(n, -1), bias)
    return y.transpose(1, 2).reshape(batch, n, *grid)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...] | str,
    dilation: tuple[int, ...],
    groups: int,
) -> torch.Tensor:
    """`F.conv2d`, in fp32 on a CPU always by oneDNN.

    For a single small picture the library would take another path, with other bits than in a batch. With one path for
    all, pictures can be decoded together (where certification finds that it holds), in half the time.
    """
    direct = x.device.type == "cpu" and x.dtype == torch.float32 and not isinstance(padding, str)
    if not direct or not torch.backends.mkldnn.is_available() or (torch.is_grad_enabled() and weight.requires_grad):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return torch.mkldnn_convolution(x.contiguous(), weight, bias, padding, stride, dilation, groups)
