"""Qwen3 with experts: attention of Qwen3, and in most or all layers an MLP of many experts.

Checkpoints hold each expert's three matrices under names of their own (`mlp.experts.7.up_proj.weight`), which is what
`save_pretrained` writes, and what a refit sends; transformers 5 fuses them in memory only.
"""

from __future__ import annotations

from engine_control.errors import InvalidRequestError
from llm_runtime.layers.moe import ExpertParts
from llm_runtime.models.base import ModelConfig
from llm_runtime.models.decoder import DecoderLM, DecoderParts
from llm_runtime.models.model_config import whole_number


class Qwen3MoeForCausalLM(DecoderLM):
    architectures = ("Qwen3MoeForCausalLM",)

    @classmethod
    def parts(cls, config: ModelConfig) -> DecoderParts:
        bias = bool(config.raw.get("attention_bias", False))
        return DecoderParts(qkv_bias=bias, output_bias=bias, qk_norm=True, experts=_expert_parts(config))


def _expert_parts(config: ModelConfig) -> ExpertParts:
    """Layer i has experts if `decoder_sparse_step` divides i + 1, and `mlp_only_layers` doesn't name it.

    Raises:
        InvalidRequestError: a number is absent or no positive one, or a token would go to more experts than there are.
    """
    raw = config.raw
    experts = whole_number(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")  # 5 and 4
    each = whole_number(raw, "num_experts_per_tok")
    if each > experts:
        raise InvalidRequestError(
            f"config.json: num_experts_per_tok={each} is more than the {experts} experts that there are",
            code="bad_model_config",
            field="num_experts_per_tok",
            value=each,
        )
    step, dense = whole_number(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    layers = range(config.num_hidden_layers)
    return ExpertParts(
        layers=frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense),
        experts=experts,
        experts_per_token=each,
        inner=whole_number(raw, "moe_intermediate_size"),
        normalised=bool(raw.get("norm_topk_prob", False)),
    )
