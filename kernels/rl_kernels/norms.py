"""Norms over the last dimension whose rows don't see each other: the library's, on contiguous rows, in one form.

Certification looks at them as at every other operation of the library. The fused ones are in files of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 1e-6
) -> torch.Tensor:
    """x `[..., D]`, weight and bias `[D]`, result of x's shape and dtype; fp32 inside, rounded once."""
    return F.layer_norm(x.contiguous(), x.shape[-1:], weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """x `[..., D]`, weight `[D]`, result of x's shape and dtype; fp32 inside, rounded once.

    The weight is widened too: a half-precision product in between would be a second rounding.
    """
    wide = None if weight is None else weight.float()
    return F.rms_norm(x.float().contiguous(), x.shape[-1:], wide, eps).to(x.dtype)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities over the last dimension in fp32, whatever x's dtype: x `[..., N]`, result fp32 `[..., N]`."""
    return F.log_softmax(x.float().contiguous(), dim=-1)
