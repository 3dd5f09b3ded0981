"""How a problem is worked out in writing, column by column from the right: what the embedded model learns to write."""

from __future__ import annotations

from llm_runtime.arithmetic.grammar import Problem


def solution(problem: Problem) -> str:
    """Return the steps and, after a colon, the answer.

    Each step is one column: `347+85=` is worked out as `7+5=12, 4+8+1=13, 3+0+1=4: 432`, where a third term is what the
    column before carried. A difference borrows ten (`352-85=` is `12-5=7, 15-8-1=6, 3-0-1=2: 267`), and one that is
    negative is turned first: `12-34=` is `34-12, 4-2=2, 3-1=2: -22`.
    """
    turned = problem.operator == "-" and problem.first < problem.second
    upper, lower = (problem.second, problem.first) if turned else (problem.first, problem.second)
    steps = [f"{upper}-{lower}"] if turned else []
    carry = 0
    for place in range(max(len(str(upper)), len(str(lower)))):
        step, carry = _column(problem.operator, upper // 10**place % 10, lower // 10**place % 10, carry)
        steps.append(step)
    return f"{', '.join(steps)}: {problem.answer}"


def _column(operator: str, upper: int, lower: int, carry: int) -> tuple[str, int]:
    """One column as an equation, and what the next column adds (of a sum) or takes off (of a difference)."""
    carried = f"{operator}{carry}" if carry else ""
    if operator == "+":
        total = upper + lower + carry
        return f"{upper}+{lower}{carried}={total}", total // 10
    borrowed = 1 if upper < lower + carry else 0
    upper += 10 * borrowed
    return f"{upper}-{lower}{carried}={upper - lower - carry}", borrowed
