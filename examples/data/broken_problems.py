"""The example's problems that a step must leave out, and some that look like them and must stay."""

# ruff: noqa: E501  # a statement is one line

from __future__ import annotations

from typing import Any, NamedTuple

from math_problems import MathProblem


class Broken(NamedTuple):
    """``columns`` are NuminaMath's that differ from the usual; ``step`` is "" for what must stay."""

    problem: MathProblem
    columns: dict[str, Any]
    step: str
    reason: str


def _broken(statement: str, answer: str, solution: str, step: str, reason: str, **columns: Any) -> Broken:
    return Broken(MathProblem(statement, answer, solution), columns, step, reason)


BROKEN = (
    _broken(
        "Prove that the product of three consecutive integers is a multiple of six.",
        "proof",
        "Among them ...",
        "statements",
        "proof",
        question_type="proof",
    ),
    _broken(
        "Let $n$ be odd. Show that $n^2 - 1$ is a multiple of eight.",
        "8",
        "$n^2-1=(n-1)(n+1)$.",
        "statements",
        "proof",
    ),
    _broken(
        "Numbers $a, b > 0$ satisfy $a + b = 2$. Demonstrate that their product is at most one.",
        "1",
        "By the inequality of means.",
        "statements",
        "proof",
    ),
    _broken(
        "Show that $x = 2$ solves $x^3 - 3x = 2$, and find the value of the other root.",
        "-1",
        "$(x-2)(x+1)^2$, so $\\boxed{-1}$.",
        "",
        "",
    ),
    _broken(
        "Which of the following numbers is a multiple of both fourteen and twenty-one?",
        "C",
        "It is $\\boxed{C}$.",
        "statements",
        "choices_missing",
        question_type="MCQ",
    ),
    _broken(
        "A merchant doubles a price and then takes a quarter off. Choose the correct statement about the new price.",
        "B",
        "$\\boxed{B}$",
        "statements",
        "choices_missing",
    ),
    _broken(
        "Which of the following is prime? (A) 51 (B) 57 (C) 59 (D) 87",
        "C",
        "Only 59 is: $\\boxed{C}$.",
        "",
        "",
        question_type="MCQ",
    ),
    _broken(
        "See https://example.org/contest/7 for the numbers; find the sum of all of them.",
        "12",
        "$\\boxed{12}$",
        "statements",
        "link",
    ),
    _broken(
        "As shown in the figure, square $ABCD$ has side $6$ and $E$ halves $CD$. Find the area of $ABE$.",
        "18",
        "$\\boxed{18}$",
        "statements",
        "figure",
    ),
    _broken(
        "![board](images/board.png) How many squares of any size are on this board?",
        "204",
        "$\\boxed{204}$",
        "statements",
        "figure",
    ),
    _broken(
        "[asy] draw((0,0)--(3,0)--(0,4)--cycle); [/asy] Find the perimeter of the triangle drawn.",
        "12",
        "$\\boxed{12}$",
        "statements",
        "figure",
    ),
    _broken(
        "Describe all ways in which a knight can tour a board of five by five squares.",
        "notfound",
        "There are many.",
        "statements",
        "no_answer",
    ),
    _broken(
        "Solve: x=1",
        "1",
        "$\\boxed{1}$",
        "statements",
        "statement_too_short",
    ),
    _broken(
        "A farmer has 240 metres of fence for a field along a straight river. What is the largest area, in square metres?",
        "7200",
        "With sides $x$ and $240-2x$ the area is largest at $x=60$: $\\boxed{3600}$.",
        "answers",
        "answer_disagrees",
    ),
    _broken(
        "Three consecutive even numbers add up to 78. Find the largest.",
        "28",
        "They are 24, 26 and 28, so the middle one is $\\boxed{26}$.",
        "answers",
        "answer_disagrees",
    ),
    _broken(
        "For how many integers $k$ from 1 to 50 is $k^2 + k$ a multiple of 10?",
        "20",
        "Both factors are looked at in turn, and the reader will see it.",
        "answers",
        "answer_not_in_solution",
    ),
    _broken(
        "A jar holds 5 red and 7 green marbles. Two are drawn. What is the probability of two green ones?",
        "\\frac{7}{22",
        "$\\frac{7}{12}\\cdot\\frac{6}{11} = \\boxed{\\frac{7}{22}}$.",
        "answers",
        "answer_not_comparable",
    ),
)
