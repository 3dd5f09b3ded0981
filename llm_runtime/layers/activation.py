"""The gate of an MLP."""

from __future__ import annotations

import torch

import rl_kernels.silu_mul as kernels


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[N, 2 I]`, the gate's half first -> `silu(gate) * up`, `[N, I]`, rounded to the dtype after each."""
    return kernels.silu_mul(gate_up)
