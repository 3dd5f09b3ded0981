"""A judge of answers by rules alone: it reads the number after the colon and the steps before it, with no model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llm_runtime.arithmetic.grammar import Problem, parse
from llm_runtime.arithmetic.worked import solution

FORM_REWARD = 0.1
"""What a wrong answer in the right form earns: enough to tell it from no answer, too little to be worth seeking."""

_NUMBER = r"-?[0-9]{1,6}"
_COLUMN = r"[0-9]{1,2}[+-][0-9](?:[+-]1)?=[0-9]{1,2}"
_FORM = re.compile(rf"(?P<steps>(?:[0-9]{{1,3}}-[0-9]{{1,3}}, )?{_COLUMN}(?:, {_COLUMN})*): (?P<answer>{_NUMBER})")


@dataclass(frozen=True)
class CheckResult:
    """What an answer shows: whether it has the form of a worked answer, whether all its steps are the problem's own,
    and whether the number at its end is the right one. An answer without the form has no steps and no number."""

    well_formed: bool
    steps: bool
    answer: bool

    @property
    def correct(self) -> bool:
        """Whether the number at the end is right; steps may be wrong, for it is the result that counts."""
        return self.answer


def check(problem_or_prompt: Problem | str, text: str) -> CheckResult:
    """Judge an answer to a problem, or to a question. Space around the answer does not matter.

    Raises `ProblemError` for a question outside the grammar.
    """
    problem = parse(problem_or_prompt) if isinstance(problem_or_prompt, str) else problem_or_prompt
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return CheckResult(False, False, False)
    steps = match["steps"] == solution(problem).partition(":")[0]
    return CheckResult(True, steps, match["answer"] == str(problem.answer))


def reward(prompt: str, text: str) -> float:
    """Return 1 for a right answer, 0.1 for a wrong one in the right form, and 0 for anything else.

    Raises `ProblemError` for a question outside the grammar.
    """
    result = check(prompt, text)
    return 1.0 if result.correct else FORM_REWARD if result.well_formed else 0.0
