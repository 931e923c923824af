"""Writes the example's problem sets, and what the pipeline should make of them, known from how they are made.

    python examples/data/make_sets.py --out DIR [--expected FILE]

Every set has the columns of a published one. Beside sound problems there are, in each, some that one step or another
must leave out: proofs, missing choices, links, figures, answers that disagree, duplicates, contaminated ones, tests
that are incomplete, reference solutions that fail.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broken_problems import BROKEN
from code_problems import FUNCTIONS, STDIN, leetcode_row, taco_row
from exam_problems import EXAM
from math_problems import MathProblem, draw

SEED = 7
EACH = 8  # sound problems of each kind of mathematics


@dataclass
class ProblemSet:
    """Rows of one file, and for each that should go the step, the reason, and of what it is a copy."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    expected: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], step: str = "", reason: str = "", of: str = "") -> str:
        """Append; ``step`` and ``reason`` say why it should go, ``of`` which row it repeats. Returns file:line."""
        self.rows.append(dict(row))
        origin = f"{self.name}:{len(self.rows)}"
        if step:
            self.expected.append({"origin": origin, "step": step, "reason": reason, **({"of": of} if of else {})})
        return origin


def olympiad(problem: MathProblem, **changes: Any) -> dict[str, Any]:
    """A row of NuminaMath-1.5's columns."""
    row = {
        "problem": problem.statement,
        "solution": problem.solution,
        "answer": problem.answer,
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "problem_is_valid": "Yes",
        "solution_is_valid": "Yes",
        "source": "olympiads",
        "synthetic": False,
    }
    return {**row, **changes}


def make_olympiads(problems: list[MathProblem]) -> tuple[ProblemSet, list[str]]:
    """(the set, where its sound problems stand)."""
    made = ProblemSet("olympiads.jsonl")
    where = []
    for number, problem in enumerate(problems):
        changes = {"source": "aops_forum"} if number % 4 == 3 else {}
        where.append(made.add(olympiad(problem, **changes)))
    for broken in BROKEN:
        made.add(olympiad(broken.problem, **broken.columns), broken.step, broken.reason)
    return made, where


def make_scaled(problems: list[MathProblem], olympiads: list[MathProblem], where: list[str]) -> ProblemSet:
    """DeepScaleR's columns: new problems, and copies of the first set's with other dress, words and numbers."""
    made = ProblemSet("scaled.jsonl")
    for problem in problems:
        made.add({"problem": problem.statement, "answer": problem.answer, "solution": problem.solution})
    for number in range(0, 24, 2):
        problem, original = olympiads[number], where[number]
        dressed = f"**Problem {number + 3}.**  {problem.statement.replace('$', '$ ')}"
        made.add(
            {"problem": dressed, "answer": problem.answer, "solution": ""},
            "exact_duplicates",
            "exact_duplicate",
            original,
        )
    for number in range(1, 24, 2):
        problem, original = olympiads[number + 24], where[number + 24]
        reworded = f"{_reworded(problem.statement)} Express your answer in simplest form."
        made.add(
            {"problem": reworded, "answer": problem.answer, "solution": problem.solution},
            "near_duplicates", "near_duplicate", original,
        )  # fmt: skip
    return made


def _reworded(statement: str) -> str:
    for before, after in (
        ("Find ", "Please determine "),
        ("What is ", "Compute "),
        ("Evaluate ", "Find "),
        ("people", "persons"),
    ):
        statement = statement.replace(before, after)
    return statement


def make_distilled(problems: list[MathProblem]) -> ProblemSet:
    """STILL-3's columns: no solutions; one problem stands in it twice."""
    made = ProblemSet("distilled.jsonl")
    origins = [made.add({"question": problem.statement, "answer": problem.answer}) for problem in problems]
    again = problems[4]
    copy = {"question": again.statement, "answer": again.answer}
    made.add(copy, "exact_duplicates_within", "exact_duplicate", origins[4])
    return made


def make_exam(problems: Sequence[MathProblem]) -> ProblemSet:
    """What the training set must not hold: as in AIME's files."""
    made = ProblemSet("exam.jsonl")
    for problem in problems:
        made.add({"problem": problem.statement, "answer": problem.answer})
    return made


def make_leaked(exam: Sequence[MathProblem]) -> ProblemSet:
    """Omni-MATH's columns; problems of the exam, whole, dressed up, and inside a longer text."""
    made = ProblemSet("leaked.jsonl")
    for number, problem in enumerate(exam[:6]):
        statement = (
            problem.statement,
            f"{number + 1}. {problem.statement.upper()}",
            f"A warm-up for the coming contest, in which calculators are not allowed. {problem.statement}",
        )[number % 3]
        made.add(
            {
                "domain": ["Mathematics -> Algebra"],
                "difficulty": 4.5,
                "problem": statement,
                "solution": problem.solution,
                "answer": problem.answer,
                "source": "contest",
            },
            "decontaminate",
            "contaminated",
            f"exam.jsonl:{number + 1}",
        )
    return made


def make_programs() -> ProblemSet:
    """TACO's columns."""
    made = ProblemSet("programs.jsonl")
    for problem in STDIN:
        made.add(taco_row(problem))
    one, two, three, four = STDIN[:4]
    told = "A variant with another story: "
    for row, reason in (
        (taco_row(one, input_output=json.dumps({"inputs": ["1\n"], "outputs": []})), "tests_incomplete"),
        (taco_row(two, input_output=""), "no_tests"),
        (taco_row(three, solutions=json.dumps(["m, n = map(int, input().split())\nprint(m + n)"])), "reference_fails"),
        (taco_row(four, solutions=json.dumps(["print(input()[::-1]"])), "reference_fails"),
        (taco_row(one, solutions="[]"), "no_solution"),
    ):
        row["question"] = f"{told}{reason} {row['question'][::-1]}"  # nobody's near-duplicate
        told = f"{told[::-1]} "
        made.add(row, "code", reason)
    mended = taco_row(two, solutions=json.dumps(["print(input())", two.solution]))
    made.add({**mended, "question": "Turn round the order of the words of the one line that you read."})
    pictured = taco_row(three, picture_num="2", question="The two pictures show a maze. Print its number of exits.")
    made.add(pictured, "statements", "figure")
    return made


def make_functions() -> ProblemSet:
    """LeetCode's columns."""
    made = ProblemSet("functions.jsonl")
    origins = [made.add(leetcode_row(problem)) for problem in FUNCTIONS]
    first, second = FUNCTIONS[:2]
    wrong = leetcode_row(first, completion=first.completion.replace("kept + ", ""))
    made.add(
        {**wrong, "problem_description": "Drop what is nothing and keep the rest where it is."},
        "code",
        "reference_fails",
    )
    empty = leetcode_row(second, test="def check(candidate):\n    pass\n")
    made.add({**empty, "problem_description": "How often does a, e, i, o or u occur?"}, "code", "tests_incomplete")
    copied = leetcode_row(FUNCTIONS[4], problem_description=f"{FUNCTIONS[4].statement}  ")
    made.add(copied, "exact_duplicates_within", "exact_duplicate", origins[4])
    return made


def make_all() -> list[ProblemSet]:
    """All sets, in the order in which the recipe names them, the exam last."""
    drawn = draw(SEED, EACH)
    olympiads, scaled, distilled = drawn[:120], drawn[120:168], drawn[168:192]
    first, where = make_olympiads(olympiads)
    return [
        first,
        make_scaled(scaled, olympiads, where),
        make_distilled(distilled),
        make_leaked(EXAM),
        make_programs(),
        make_functions(),
        make_exam(EXAM),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--expected", type=Path, help="write the expected ledger here too")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sets = make_all()
    for made in sets:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made.rows)
        (arguments.out / made.name).write_text(text, encoding="utf-8")
    if arguments.expected:
        lines = (json.dumps(row) + "\n" for made in sets for row in made.expected)
        arguments.expected.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
