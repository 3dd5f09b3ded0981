"""What a language model owes the engine, and what the engine lends it for attention.

A model computes a flat batch: all tokens of all sequences in one row, without padding. It knows nothing of sequences;
keys and values of earlier tokens are behind `Attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine_control.refit.target import RefitTarget
from rl_kernels.paged_qkv import HeadNorms, Rotation


@dataclass(frozen=True)
class ModelConfig:
    """What an engine needs to know of a `config.json`, and what is in it besides (`raw`).

    num_attention_heads, num_key_value_heads, intermediate_size: of the whole model, whatever a rank has of them.
    eos_token_ids: from generation_config.json, else config.json. quantised: the linear layers of attention and MLP are
        kept in one byte a number (see `layers.fp8`); of `LLMConfig`, not of the file.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    rope_scaling: Mapping[str, Any] | None = None
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    quantised: bool = False


class Attention(Protocol):
    """Lent to one forward. It knows which tokens belong together and where their keys and values lie."""

    def __call__(self, layer: int, qkv: torch.Tensor, *, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        """qkv `[N, (heads + 2 * kv_heads) * D]` of the forward's tokens: queries, keys and values of this rank's heads,
        as projections leave them. Queries and keys are normed (if there are norms) and turned; keys and values are
        kept; returned is `[N, heads, D]`: causal attention over each token's own sequence."""


class TensorParallel(Protocol):
    """This rank's place among those that share a model."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, added in the order of ranks, the same bits on each."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `[..., n]`, side by side along the last axis."""


class OneRank:
    """The place of a rank that shares with nobody."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CausalLM(torch.nn.Module, ABC):
    """A decoder-only language model on one rank. Row i of every result depends on token i, its position and what
    `attention` returns for it alone. Positions below `context_length` can be computed."""

    config: ModelConfig
    context_length: int
    tensor_parallel: TensorParallel

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """input_ids, positions `[N]` int64 -> hidden states `[N, hidden_size]` after the last norm, whole on each
        rank."""

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[M, hidden_size]` -> `[M, vocab_size]` in the model's dtype, whole on each rank."""

    @abstractmethod
    def refit_target(self) -> RefitTarget:
        """This rank's weights under the checkpoint's names, as one module called `model`."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold its forward, as it computes now: then it asks the device for no number on its
        way."""
        return True

    @property
    def local_kv_heads(self) -> int:
        """Of this rank: what a KV cache needs room for."""
        return max(self.config.num_key_value_heads // self.tensor_parallel.size, 1)
