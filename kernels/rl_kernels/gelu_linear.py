"""The first half of a feed-forward: a linear layer and GELU's tanh approximation, on a GPU in one call of the library.

There, in half precision, the product's fp32 sums get their bias and activation before they are rounded, once; elsewhere
they are rounded in between, as the two layers do. Another pass over the widest tensor of a block is saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_kernels.fused import check_dtypes, check_shape, differentiable, seen_by_modes
from rl_kernels.linear import ROWS

HALVES = (torch.bfloat16, torch.float16)


def in_one_call(x: torch.Tensor) -> bool:
    """Whether the library computes both at once where x is. On a CPU its call has another GELU."""
    return x.is_cuda and x.dtype in HALVES


def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`gelu(x @ weight.T + bias)`: x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`."""
    return activated_linear(x, weight, bias) if in_one_call(x) else _twin(x, weight, bias)[0]


@seen_by_modes
def activated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same in one call.

    Raises:
        ValueError: shapes that don't fit, several dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    check_dtypes("activated_linear", x=x, weight=weight, bias=bias)
    check_shape("activated_linear", "weight", weight, (len(weight), x.shape[-1]))
    check_shape("activated_linear", "bias", bias, (len(weight),))
    return differentiable(_launch, _twin, (x, weight, bias))[0]


def _twin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.gelu(F.linear(x, weight, bias), approximate="tanh"),)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    rows = F.pad(rows, (0, 0, 0, ROWS - count)) if count < ROWS else rows.contiguous()
    y = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return (y[:count].reshape(*x.shape[:-1], len(weight)),)
