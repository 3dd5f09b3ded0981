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
        dtype, quantised = config.dtype, config.quantised
        self.gate_up_proj = ColumnLinear(hidden, both, bias=bias, dtype=dtype, quantised=quantised)
        self.down_proj = RowLinear(
            inner, hidden, share, bias=bias, dtype=dtype, tensor_parallel=tensor_parallel, quantised=quantised
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden_size]` -> the same."""
        y: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return y
