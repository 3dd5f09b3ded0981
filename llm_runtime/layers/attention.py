"""What surrounds attention in a layer: the projections, and the weights of the norms of queries and keys."""

from __future__ import annotations

import torch

from llm_runtime.layers.linear import ColumnLinear, RowLinear
from llm_runtime.layers.norm import RMSNorm
from llm_runtime.layers.placement import evenly, kv_share
from llm_runtime.models.base import Attention, ModelConfig, TensorParallel
from rl_kernels.paged_qkv import HeadNorms, Rotation


class AttentionProjections(torch.nn.Module):
    """One layer's attention, but for attention itself, which is lent. Ranks share its heads."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: bool,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.layer = layer
        head_dim = config.head_dim
        share = evenly("num_attention_heads", config.num_attention_heads, tensor_parallel)
        shared_kv = kv_share(config.num_key_value_heads, tensor_parallel)
        width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        outputs = {"q_proj": (width, share), "k_proj": (kv_width, shared_kv), "v_proj": (kv_width, shared_kv)}
        self.qkv_proj = ColumnLinear(
            config.hidden_size, outputs, bias=qkv_bias, dtype=config.dtype, quantised=config.quantised
        )
        self.o_proj = RowLinear(
            width,
            config.hidden_size,
            share,
            bias=output_bias,
            dtype=config.dtype,
            tensor_parallel=tensor_parallel,
            quantised=config.quantised,
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=config.dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=config.dtype) if qk_norm else None

    def forward(self, x: torch.Tensor, rotation: Rotation, attention: Attention) -> torch.Tensor:
        """x `[N, hidden_size]` -> `[N, hidden_size]`; `rotation` knows the rows' positions."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        attended = attention(self.layer, self.qkv_proj(x), rotation=rotation, norms=norms)
        y: torch.Tensor = self.o_proj(attended.flatten(1))
        return y
