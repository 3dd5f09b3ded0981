"""Model families: one file each, by the file's name. A family names in `architectures` what it can load."""

from __future__ import annotations

from engine_control.registry import Registry
from llm_runtime.models.base import CausalLM

families: Registry[CausalLM] = Registry(
    "llm_runtime.models",
    CausalLM,  # type: ignore[type-abstract]
    noun="model family",
    skip=("checkpoint", "decoder", "loading", "model_config", "weights"),
)

__all__ = ["families"]
