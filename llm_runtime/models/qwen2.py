"""Qwen2 and Qwen2.5, dense: queries, keys and values have a bias."""

from __future__ import annotations

from llm_runtime.models.base import ModelConfig
from llm_runtime.models.decoder import DecoderLM, DecoderParts


class Qwen2ForCausalLM(DecoderLM):
    architectures = ("Qwen2ForCausalLM",)

    @classmethod
    def parts(cls, config: ModelConfig) -> DecoderParts:
        return DecoderParts(qkv_bias=True)
