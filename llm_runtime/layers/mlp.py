"""The gated MLP that all families here have."""

from __future__ import annotations

import torch

from llm_runtime.layers.activation import silu_mul
from llm_runtime.layers.linear import ColumnLinear, RowLinear
from llm_runtime.layers.placement import evenly
from llm_runtime.models.base import ModelConfig, TensorParallel


class GatedMLP(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))`; ranks share the inner width."""

    def __init__(self, config: ModelConfig, *, bias: bool, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        share = evenly("intermediate_size", inner, tensor_parallel)
        both = {"gate_proj": (inner, share), "up_proj": (inner, share)}
        self.gate_up_proj = ColumnLinear(hidden, both, bias=bias, dtype=config.dtype)
        self.down_proj = RowLinear(inner, hidden, share, bias=bias, dtype=config.dtype, tensor_parallel=tensor_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden_size]` -> the same."""
        y: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return y
