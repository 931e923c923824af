"""Answers as models write them: what is beside a value, claims without a box, steps, huge numbers, forms of one value.

The labels are thought out by hand. That these kinds are all there are is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from or1_verify.answer import last_box
from or1_verify.config import MathConfig, VerifyConfig
from or1_verify.math.claim import claimed_answer
from or1_verify.math.verifier import MathVerifier
from or1_verify.problems.layouts import read_published
from or1_verify.problems.rows import RowError
from or1_verify.types import Message, Problem

PAIRS = [json.loads(line) for line in Path(__file__).with_name("answers_in_the_world.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(20.0)
    yield made
    made.close()


def judged(verifier: MathVerifier, gold: str, answer: str) -> str:
    problem = Problem("p", "here", "math", (Message("user", "?"),), json.dumps([gold]), {}, "here:1")
    return verifier.verify(problem, rf"</think> So it is $\boxed{{{answer}}}$.", truncated=False).status


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['gold'][:30]} {pair['answer'][:30]}")
def test_a_form_of_the_gold_or_another_answer(verifier: MathVerifier, pair: dict[str, Any]) -> None:
    assert (judged(verifier, pair["gold"], pair["answer"]) == "right") == pair["right"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 17.", "17"),
        ("Add 9 and 8.\n\n**Final Answer: 17**", "17"),
        ("Final Answer: The final answer is $17$. I hope it is correct.", "17"),
        ("So the total is **17**.", "17"),
        ("9 + 8 is what we need.\n17", "17"),
        ("最终答案：17", "17"),
        ("Answer: (2, 3)", "(2, 3)"),
        ("The answer is 17 or 18.", "17 or 18"),  # judged as it stands: a list, which is not 17
        ("The answer is not 17.", "not 17"),
        ("17 is not the answer.", None),
        ("It is about 17.", "about 17"),
        ("Page 17", None),
        ("Could it be 17?", None),
        ("A possible answer is 17.", None),
        ("Answer candidates: 17", None),
        ("The sum of the answers is 17.", None),
        ("The maximum answer is 17.", None),
        ("The answer to a different problem is 17.", None),
        ("<answer>17</answer>", "17"),
        ("✅ Final Answer: **17**", "17"),
        ("The answer is 17. Or the answer is 18.", None),
        ("The answer is 17. No, wait.", None),
        ("The answer isn't 17.", None),
        ("So there are 17 ways.", "17 ways"),
        ("したがって、答えは **17** です。", "17  です"),
        ("故选：B。", "B"),
        ("Perhaps the answer is 17.", None),
        ("The wrong answer is 17.", None),
        ("-answer = 17", None),
        ("答案不是17", None),
        ("The answer is ~17", None),
        ("1. 16\n2. 17", None),
        ("9 + 8 = 17\n17", "17"),
        ("", None),
    ],
)
def test_a_claim_without_a_box(text: str, value: str | None) -> None:
    assert claimed_answer(text) == value


@pytest.mark.parametrize(("without_box", "status"), [("claimed", "right"), ("refuse", "no_answer")])
def test_whether_a_claim_counts(without_box: str, status: str) -> None:
    config = VerifyConfig(math=MathConfig.model_validate({"without_box": without_box}))
    verifier = MathVerifier(20.0, config.math)
    problem = Problem("p", "here", "math", (Message("user", "9 + 8?"),), '["17"]', {}, "here:1")
    try:
        assert verifier.verify(problem, "</think> The answer is 17.", truncated=False).status == status
        assert verifier.verify(problem, "</think> The answer is 17 or 18.", truncated=False).reward == 0
    finally:
        verifier.close()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"$\boxed{2}$ and $\boxed{3}$", "2, 3"),
        (r"\boxed{2} or \boxed{3}", "2, 3"),
        (r"$x=\boxed{2}$ or $x=\boxed{3}$", "x=2, x=3"),
        (r"maybe \boxed{2}, maybe \boxed{3}", "2, 3"),
        (r"\fcolorbox{red}{white}{7}", "7"),
        (r"\framebox[2em]{7}", "7"),
        (r"\boxed{2}. Therefore \boxed{3}", "3"),
        (r"\boxed{3}, \boxed{3}", "3"),
        (r"\fbox{7}", "7"),
        (r"\boxed\frac12$", r"\frac12"),
        (r"\boxed{\boxed{7}}", "7"),
    ],
)
def test_boxes(text: str, content: str) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("solution", "golds"),
    [
        (r"So $x=\boxed{-2}$ or $x=\boxed{1}$.", ["x=-2, x=1"]),
        (r"Lengths \boxed{3} and \boxed{7}.", ["3, 7"]),
        (r"First \boxed{7}. As said, \boxed{7}.", ["7"]),
        (r"Then \boxed{3}. Hence \boxed{7}.", None),
        (r"Then \boxed{2}. Hence \boxed{12}.", None),
    ],
)
def test_a_solution_of_several_boxes_is_one_list_or_unusable(solution: str, golds: list[str] | None) -> None:
    row = {"problem": "?", "solution": solution}
    if golds is None:
        with pytest.raises(RowError, match="several boxes"):
            read_published(row, "math", "here:1")
    else:
        assert json.loads(read_published(row, "math", "here:1").ground_truth) == golds
