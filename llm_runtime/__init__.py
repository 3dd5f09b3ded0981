"""A small, exact runtime of language models for RL: rollouts with log-probs, refits, sleep, on `engine_control`.

    from llm_runtime import LLM
    print(LLM().generate("12+34=", {"temperature": 0.0})[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_runtime.config import LLMConfig
from llm_runtime.output import FinishReason, GenerateOutput, WeightVersionSpan
from llm_runtime.params import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from llm_runtime.llm import LLM, Generated

__all__ = [
    "LLM",
    "FinishReason",
    "GenerateOutput",
    "GenerateRequest",
    "Generated",
    "LLMConfig",
    "SamplingParams",
    "WeightVersionSpan",
]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch; what is only configured or parsed doesn't need it."""
    if name in ("LLM", "Generated"):
        from llm_runtime import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
