"""The gate of an MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[..., 2 I]`, the gate's half first -> `silu(gate) * up`, `[..., I]`, rounded to the dtype after each."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
