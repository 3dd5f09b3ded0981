"""Llama 2 and 3."""

from __future__ import annotations

from llm_runtime.models.base import ModelConfig
from llm_runtime.models.decoder import DecoderLM, DecoderParts


class LlamaForCausalLM(DecoderLM):
    architectures = ("LlamaForCausalLM",)

    @classmethod
    def parts(cls, config: ModelConfig) -> DecoderParts:
        bias = bool(config.raw.get("attention_bias", False))
        return DecoderParts(qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.raw.get("mlp_bias", False)))
