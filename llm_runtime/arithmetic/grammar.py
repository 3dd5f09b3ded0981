"""The questions of the arithmetic world: what a problem is, how it is asked, and which problems no training sees."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

LARGEST_OPERAND = 999

_PHRASINGS = {
    "+": ("{a}+{b}=", "{a} + {b} =", "What is {a} plus {b}?", "Compute {a} + {b}.", "Add {a} and {b}."),
    "-": ("{a}-{b}=", "{a} - {b} =", "What is {a} minus {b}?", "Compute {a} - {b}.", "Subtract {b} from {a}."),
}
_HELD_OUT_ONE_IN = 8
_MOST_DIGITS = len(str(LARGEST_OPERAND))


class ProblemError(ValueError):
    """A problem or a question lies outside the grammar; the message names the part that does."""


@dataclass(frozen=True)
class Problem:
    """A sum or a difference of two whole numbers from 0 to 999; a difference may be negative."""

    first: int
    operator: str
    second: int

    def __post_init__(self) -> None:
        if self.operator not in _PHRASINGS:
            raise ProblemError(f"operator {self.operator!r} is none of {', '.join(_PHRASINGS)}")
        for name, operand in (("first", self.first), ("second", self.second)):
            if not 0 <= operand <= LARGEST_OPERAND:
                raise ProblemError(f"{name} operand {operand} is not within 0 to {LARGEST_OPERAND}")

    @property
    def answer(self) -> int:
        return self.first + self.second if self.operator == "+" else self.first - self.second


def phrasings(operator: str) -> tuple[str, ...]:
    """The ways of asking for a sum (`+`) or a difference (`-`), with `{a}` and `{b}` for the operands."""
    return _PHRASINGS[operator]


def prompt(problem: Problem, phrasing: int = 0) -> str:
    """Return the question in one of its phrasings; number 0 is the shortest, such as `12+34=`."""
    return _PHRASINGS[problem.operator][phrasing].format(a=problem.first, b=problem.second)


def parse(text: str) -> Problem:
    """Return the problem that a question asks; case and spacing do not matter.

    Raises `ProblemError` for a text that is no phrasing of any problem.
    """
    words = " ".join(text.split()).lower()
    for operator, pattern in _PATTERNS:
        match = pattern.fullmatch(words)
        if match:
            return Problem(int(match["a"]), operator, int(match["b"]))
    known = ", ".join(repr(phrasing.format(a=12, b=34)) for both in _PHRASINGS.values() for phrasing in both)
    raise ProblemError(f"{text[:200]!r} is no question of this grammar; questions read like {known}")


def is_held_out(problem: Problem) -> bool:
    """Whether no training uses this problem, in any phrasing and with its operands either way round.

    One problem in eight is: which ones is settled by a hash, the same on every machine.
    """
    low, high = sorted((problem.first, problem.second))
    return _digest(f"{low}{problem.operator}{high}")[0] % _HELD_OUT_ONE_IN == 0


def held_out_prompts(count: int = 200, *, seed: int = 0) -> list[str]:
    """Return that many distinct questions about held-out problems: the same for a seed on every machine.

    Both operators, all phrasings and, for each operand, one, two and three digits are equally likely.
    """
    drawn = (prompt(problem, phrasing) for problem, phrasing in _draws("held out", seed) if is_held_out(problem))
    distinct: dict[str, None] = {}
    while len(distinct) < count:
        distinct[next(drawn)] = None
    return list(distinct)


def training_prompts(count: int, *, seed: int = 0) -> list[str]:
    """Return that many questions about problems that are not held out, drawn alike; they may repeat."""
    drawn = (prompt(problem, phrasing) for problem, phrasing in _draws("training", seed) if not is_held_out(problem))
    return list(itertools.islice(drawn, count))


def _draws(part: str, seed: int) -> Iterator[tuple[Problem, int]]:
    """Problems and phrasings without end. Drawn from hashes, for random generators change with library versions."""
    for index in itertools.count():
        digest = _digest(f"{part}/{seed}/{index}")
        operator = "+-"[digest[0] % 2]
        phrasing = digest[1] % len(_PHRASINGS[operator])
        yield Problem(_operand(digest[2:12]), operator, _operand(digest[12:22])), phrasing


def _operand(entropy: bytes) -> int:
    digits = 1 + int.from_bytes(entropy[:4], "big") % _MOST_DIGITS
    smallest = 10 ** (digits - 1) if digits > 1 else 0
    return smallest + int.from_bytes(entropy[4:], "big") % (10**digits - smallest)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _pattern(phrasing: str) -> re.Pattern[str]:
    """Matches the phrasing in lower case, with any spacing around signs and punctuation."""
    tokens = re.findall(r"\{[ab]\}|[a-z]+|[^\sa-z]", phrasing.lower())
    parts = [f"(?P<{token[1]}>[0-9]{{1,9}})" if token.startswith("{") else re.escape(token) for token in tokens]
    return re.compile(r"\s?".join(parts))


_PATTERNS = [(operator, _pattern(phrasing)) for operator, both in _PHRASINGS.items() for phrasing in both]
