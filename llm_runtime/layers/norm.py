"""RMS norm over the last axis, alone and behind a residual sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import rl_kernels.rms_norm as kernels
from llm_runtime.layers.placement import WHOLE, Piece, empty_parameter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x `[..., D]`, weight `[D]` -> x's shape and dtype, in transformers' order: normed in fp32, rounded to x's dtype,
    then multiplied. In fp32 nothing is rounded in between, so the library's own may do it, which takes one launch."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return kernels.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual`, and that sum, both of x's dtype."""
    if x.device.type == "cpu":
        total = residual + x
        return rms_norm(total, weight, eps), total
    return kernels.add_rms_norm(x, residual, weight, eps)


class RMSNorm(torch.nn.Module):
    """`rms_norm`, or `add_rms_norm` if a residual is given, with a weight that every rank has whole."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum. Without a residual the sum is x."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        size = self.weight.shape[0]
        yield f"{path}.weight", Piece(self, "weight", (size,), 0, WHOLE, 0, size)
