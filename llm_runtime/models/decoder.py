"""The decoder that all families here share; a family says which of its parts it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from llm_runtime.layers.attention import AttentionProjections
from llm_runtime.layers.embedding import VocabularyEmbedding, VocabularyHead
from llm_runtime.layers.mlp import GatedMLP
from llm_runtime.layers.moe import ExpertParts, Experts, SparseMLP
from llm_runtime.layers.norm import RMSNorm
from llm_runtime.layers.rotary import RotaryEmbedding
from llm_runtime.models.base import Attention, CausalLM, ModelConfig, OneRank, TensorParallel
from llm_runtime.models.weights import PlacedWeights, SharedWeights
from rl_kernels.paged_qkv import Rotation


@dataclass(frozen=True)
class DecoderParts:
    """What families differ in: which linear layers have a bias, whether queries and keys are normed by head, and
    whether some layers have experts."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertParts | None = None


class DecoderLayer(torch.nn.Module):
    """Attention and MLP, each behind a norm and added to what it came from."""

    def __init__(
        self, config: ModelConfig, layer: int, parts: DecoderParts, *, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype)
        self.self_attn = AttentionProjections(
            config,
            layer,
            qkv_bias=parts.qkv_bias,
            output_bias=parts.output_bias,
            qk_norm=parts.qk_norm,
            tensor_parallel=tensor_parallel,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype)
        self.mlp: GatedMLP | SparseMLP
        if parts.experts is not None and layer in parts.experts.layers:
            self.mlp = SparseMLP(config, parts.experts, tensor_parallel=tensor_parallel)
        else:
            self.mlp = GatedMLP(config, bias=parts.mlp_bias, tensor_parallel=tensor_parallel)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, hidden_size]` each. The layer's result is the sum of the two tensors returned; the next norm adds them
        up."""
        normed, residual = self.input_layernorm.add(x, residual)
        normed, residual = self.post_attention_layernorm.add(self.self_attn(normed, rotation, attention), residual)
        return self.mlp(normed), residual


class Decoder(torch.nn.Module):
    """Tokens to hidden states."""

    def __init__(
        self, config: ModelConfig, parts: DecoderParts, *, context_length: int, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabularyEmbedding(
            config.vocab_size, config.hidden_size, dtype=config.dtype, tensor_parallel=tensor_parallel
        )
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, parts, tensor_parallel=tensor_parallel)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=config.dtype)
        self.rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.rope_scaling, context_length=context_length
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        rotation = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, attention)
        normed: torch.Tensor = self.norm.add(x, residual)[0]
        return normed


class DecoderLM(CausalLM):
    """A whole model of this kind. A family is a subclass in a file of its own."""

    architectures: ClassVar[tuple[str, ...]]
    """Names in a `config.json`'s `architectures` that this class can load."""

    def __init__(
        self,
        config: ModelConfig,
        tensor_parallel: TensorParallel | None = None,
        *,
        context_length: int | None = None,
    ) -> None:
        """Weights lie on the default device, in the config's dtype, and hold whatever was there. Positions below
        `context_length` can be computed; by default the config's.

        Raises:
            InvalidRequestError: ranks can't share the model evenly, or the config asks for what the family hasn't got.
        """
        super().__init__()
        self.config = config
        self.tensor_parallel = tensor_parallel or OneRank()
        self.context_length = context_length or config.max_position_embeddings
        self.model = Decoder(
            config,
            self.parts(config),
            context_length=self.context_length,
            tensor_parallel=self.tensor_parallel,
        )
        self.lm_head = VocabularyHead(
            config.vocab_size, config.hidden_size, dtype=config.dtype, tensor_parallel=self.tensor_parallel
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def parts(cls, config: ModelConfig) -> DecoderParts:
        """What a model of this config has."""
        raise NotImplementedError(cls.__name__)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        hidden_states: torch.Tensor = self.model(input_ids, positions, attention)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden_states)
        return logits

    @property
    def capturable(self) -> bool:
        return all(module.grouped for module in self.modules() if isinstance(module, Experts))

    def refit_target(self) -> PlacedWeights:
        kind = PlacedWeights if self.tensor_parallel.size == 1 else SharedWeights
        return kind(self, self.tensor_parallel)
