"""A small, exact runtime of language models for RL: rollouts with log-probs, refits, sleep, on `engine_control`.

from llm_runtime import LLM
print(LLM().generate("12+34=", {"temperature": 0.0})[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_runtime.config import LLMConfig
from llm_runtime.output import FinishReason, Generated, GenerateOutput, WeightVersionSpan
from llm_runtime.params import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from llm_runtime.client import LLMClient
    from llm_runtime.llm import LLM

__all__ = [
    "LLM",
    "LLMClient",
    "FinishReason",
    "GenerateOutput",
    "GenerateRequest",
    "Generated",
    "LLMConfig",
    "SamplingParams",
    "WeightVersionSpan",
]


def __getattr__(name: str) -> Any:
    """`LLM` and `LLMClient` bring torch; what is only configured or parsed doesn't need it."""
    if name == "LLM":
        from llm_runtime.llm import LLM

        return LLM
    if name == "LLMClient":
        from llm_runtime.client import LLMClient

        return LLMClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
