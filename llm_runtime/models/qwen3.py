"""Qwen3, dense: queries and keys are normed by head."""

from __future__ import annotations

from llm_runtime.models.base import ModelConfig
from llm_runtime.models.decoder import DecoderLM, DecoderParts


class Qwen3ForCausalLM(DecoderLM):
    architectures = ("Qwen3ForCausalLM",)

    @classmethod
    def parts(cls, config: ModelConfig) -> DecoderParts:
        bias = bool(config.raw.get("attention_bias", False))
        return DecoderParts(qkv_bias=bias, output_bias=bias, qk_norm=True)
