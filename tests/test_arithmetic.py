"""The arithmetic world: its questions, its worked answers, and the checker that judges them."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_runtime.arithmetic import (
    LARGEST_OPERAND,
    Problem,
    ProblemError,
    check,
    held_out_prompts,
    is_held_out,
    parse,
    phrasings,
    prompt,
    reward,
    solution,
    training_prompts,
)

operands = st.integers(0, LARGEST_OPERAND)
problems = st.builds(Problem, operands, st.sampled_from("+-"), operands)


@pytest.mark.parametrize(
    ("question", "worked"),
    [
        ("347+85=", "7+5=12, 4+8+1=13, 3+0+1=4: 432"),
        ("Add 2 and 3.", "2+3=5: 5"),
        ("What is 352 minus 85?", "12-5=7, 15-8-1=6, 3-0-1=2: 267"),
        ("Subtract 98 from 105.", "15-8=7, 10-9-1=0, 1-0-1=0: 7"),
        ("12 - 34 =", "34-12, 4-2=2, 3-1=2: -22"),
    ],
)
def test_a_question_is_worked_out_column_by_column(question: str, worked: str) -> None:
    assert solution(parse(question)) == worked


@given(problem=problems)
def test_every_step_of_a_solution_is_true_and_its_digits_are_the_answers(problem: Problem) -> None:
    steps, _, answer = solution(problem).partition(": ")
    columns = [step.split("=") for step in steps.split(", ") if "=" in step]
    for terms, result in columns:
        assert sum(int(term) for term in re.findall(r"^\d+|[+-]\d+", terms)) == int(result)
    digits = "".join(str(int(result) % 10) for _, result in reversed(columns))
    leading = columns[-1][1][:-1]
    assert int(answer) == problem.answer
    assert abs(problem.answer) == int(leading + digits)


@given(problem=problems, phrasing=st.integers(0, 4))
def test_every_phrasing_of_a_problem_parses_back_to_it(problem: Problem, phrasing: int) -> None:
    question = prompt(problem, phrasing)
    assert parse(question) == problem
    assert parse(f"  {question.upper()}\n".replace(" ", "  ")) == problem


def test_no_two_phrasings_of_a_problem_are_equal() -> None:
    for operator in "+-":
        questions = [prompt(Problem(12, operator, 34), number) for number in range(len(phrasings(operator)))]
        assert len(set(questions)) == len(questions) == 5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no question"),
        ("What is love?", "no question"),
        ("12*34=", "no question"),
        ("1 2+34=", "no question"),
        ("12+34=46", "no question"),
        ("9" * 5000 + "+1=", "no question"),
        ("1000+1=", "first operand 1000"),
        ("Subtract 1000 from 1.", "second operand 1000"),
    ],
)
def test_a_question_outside_the_grammar_is_refused_by_the_part_at_fault(text: str, named: str) -> None:
    with pytest.raises(ProblemError, match=named):
        parse(text)


def test_a_problem_outside_the_grammar_is_refused() -> None:
    with pytest.raises(ProblemError, match="operator"):
        Problem(1, "*", 2)
    with pytest.raises(ProblemError, match="second operand -1"):
        Problem(1, "+", -1)


def test_no_held_out_problem_is_among_the_training_ones_in_any_phrasing_or_turned_round() -> None:
    def problem_sets(questions: list[str]) -> set[tuple[int, str, int]]:
        return {
            (min(p.first, p.second), p.operator, max(p.first, p.second)) for p in (parse(text) for text in questions)
        }

    assert not problem_sets(held_out_prompts(1000)) & problem_sets(training_prompts(20_000))


@given(problem=problems)
def test_a_problem_and_its_turn_are_held_out_together(problem: Problem) -> None:
    assert is_held_out(problem) == is_held_out(Problem(problem.second, problem.operator, problem.first))


def test_one_problem_in_eight_is_held_out() -> None:
    held_out = [is_held_out(Problem(a, "+", b)) for a in range(0, 1000, 13) for b in range(a, 1000, 13)]
    assert sum(held_out) / len(held_out) == pytest.approx(1 / 8, abs=0.02)


def test_held_out_questions_are_distinct_and_the_same_on_every_machine() -> None:
    questions = held_out_prompts(200)
    assert len(set(questions)) == len(questions) == 200
    assert questions[:3] == ["13+268=", "85 + 9 =", "Subtract 992 from 878."]
    assert held_out_prompts(200, seed=1) != questions
    assert training_prompts(2) == ["What is 7 plus 382?", "531+20="]


def test_questions_spread_over_operators_phrasings_and_lengths() -> None:
    asked = [parse(text) for text in held_out_prompts(400)]
    assert 0.4 < sum(p.operator == "+" for p in asked) / 400 < 0.6
    lengths = Counter(len(str(p.first)) for p in asked)
    assert all(0.2 < lengths[digits] / 400 < 0.45 for digits in (1, 2, 3))
    signs = Counter(p.answer < 0 for p in asked)
    assert signs[True] > 60
    assert len({re.sub(r"\d+", "#", text) for text in held_out_prompts(400)}) == 9 + 1


@given(problem=problems, phrasing=st.integers(0, 4))
def test_a_solution_is_right_in_every_respect_and_earns_the_whole_reward(problem: Problem, phrasing: int) -> None:
    result = check(prompt(problem, phrasing), f" {solution(problem)}\n")
    assert (result.well_formed, result.steps, result.answer, result.correct) == (True, True, True, True)
    assert reward(prompt(problem, phrasing), solution(problem)) == 1.0


@given(problem=problems, off=st.integers(-2000, 2000).filter(bool))
def test_another_number_at_the_end_is_wrong_though_well_formed(problem: Problem, off: int) -> None:
    steps = solution(problem).partition(":")[0]
    result = check(problem, f"{steps}: {problem.answer + off}")
    assert (result.well_formed, result.steps, result.correct) == (True, True, False)
    assert reward(prompt(problem), f"{steps}: {problem.answer + off}") == 0.1


def test_a_wrong_step_before_a_right_answer_is_noticed_and_costs_nothing() -> None:
    result = check("12+34=", "2+4=7, 1+3=4: 46")
    assert (result.well_formed, result.steps, result.answer) == (True, False, True)
    assert reward("12+34=", "2+4=7, 1+3=4: 46") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "46",
        ": 46",
        "2+4=6: ",
        "2+4=6, 1+3=4: 46: 46",
        "2+4=6, 1+3=4: 046x",
        "2+4=6 1+3=4: 46",
        "2+4=6, 1+3=4: ４６",
    ],
)
def test_an_answer_in_another_form_earns_nothing(text: str) -> None:
    assert not check("12+34=", text).well_formed
    assert reward("12+34=", text) == 0.0


@given(text=st.text())
def test_no_text_makes_the_checker_fail(text: str) -> None:
    assert reward("12+34=", text) in (0.0, 0.1, 1.0)
