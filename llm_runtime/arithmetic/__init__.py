"""A small world of sums and differences: how they are asked, worked out column by column, and judged by rules."""

from llm_runtime.arithmetic.checker import CheckResult, check, reward
from llm_runtime.arithmetic.grammar import (
    LARGEST_OPERAND,
    Problem,
    ProblemError,
    held_out_prompts,
    is_held_out,
    parse,
    phrasings,
    prompt,
    training_prompts,
)
from llm_runtime.arithmetic.worked import solution

__all__ = [
    "LARGEST_OPERAND",
    "CheckResult",
    "Problem",
    "ProblemError",
    "check",
    "held_out_prompts",
    "is_held_out",
    "parse",
    "phrasings",
    "prompt",
    "reward",
    "solution",
    "training_prompts",
]
