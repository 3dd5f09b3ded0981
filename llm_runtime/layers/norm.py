"""RMS norm over the last axis, alone and behind a residual sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llm_runtime.layers.placement import WHOLE, Piece, empty_parameter
from rl_kernels.rms_norm import add_rms_norm, rms_norm


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
