"""Answers as models write them: what is beside a value, claims without a box, steps, huge numbers, forms of one value.

The labels are thought out by hand. That these kinds are all there are is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from or1_verify.answer import last_box
from or1_verify.config import MathConfig, VerifyConfig
from or1_verify.math.claim import claimed_answer
from or1_verify.math.verifier import MathVerifier
from or1_verify.problems.layouts import read_published
from or1_verify.problems.rows import RowError
from or1_verify.types import Message, Problem

RIGHT = [
    # decoration
    (r"17", r"\LARGE 17"),
    (r"17", r"\begin{gathered} 17 \end{gathered}"),
    (r"17", r"\begin{align*} y &= 17 \end{align*}"),
    (r"17", r"\text{Final answer: } 17"),
    (r"17", r"17 \text{ (in total)}"),
    (r"17", r"17 (pencils)"),
    (r"17", r"\therefore 17"),
    (r"17", "17 ✓"),
    (r"17", r"\text{exactly } 17"),
    # typed without LaTeX
    (r"y^3-2", "y**3 - 2"),
    (r"(3,\infty)", "(3, infinity)"),
    (r"y \ne 2", "y != 2"),
    (r"\frac{m(m-1)}{2}", "C(m,2)"),
    (r"\lfloor 7y \rfloor", "floor(7y)"),
    (r"\alpha", "alpha"),
    # an equation whose left side names what is asked for
    (r"8", r"\lim_{x \to 1} (x+7) = 8"),
    (r"8", r"\det B = 8"),
    (r"8", r"g(g(1)) = 8"),
    (r"8", "p+q = 5+3 = 8"),
    # choices
    (r"D", r"D: \text{none of these}"),
    (r"D", r"\text{(D) } 12"),
    (r"B, D", "D, B"),
    # sets, groups of digits, degrees, roots, times
    (r"\{2,4,6\}", r"\{2,4\} \cup \{4,6\}"),
    (r"\{4\}", r"\{2,4\} \cap \{4,6\}"),
    (r"7,\! 250", "7250"),
    (r"90 - \beta", r"90^\circ - \beta"),
    (r"\sqrt[3]{(y-2)^2}", r"(y-2)^{2/3}"),
    (r"14:05", r"2:05 \text{ p.m.}"),
    (r"6 \text{ PM}", r"6:00 \text{ p.m.}"),
    # integers
    (r"\lceil \frac{m}{4} \rceil", r"\lfloor \frac{m+3}{4} \rfloor"),
    (r"(-1)^k", r"\cos(k\pi)"),
    (r"17 \bmod 5", "2"),
    # other languages
    (r"17", "答案：17"),
    (r"17", r"17\text{个}"),
    (r"\text{No}", "否"),
    (r"17", r"\text{Die Antwort ist } 17"),
    (r"17", "17（个）"),
    (r"17 \text{ cm}^2", "17平方厘米"),
    (r"17 \text{ hours}", r"17 \text{ Stunden}"),
    (r"4, 6", r"4 \text{ und } 6"),
    (r"\text{Yes}", r"\text{Sí}"),
    # points, vectors, matrices
    (r"Q(4,-6)", "(4,-6)"),
    (r"(4,-6)", "Q = (4,-6)"),
    (r"Q(4,-6)", "Q: (4,-6)"),
    (r"\mu=3, Q(\pm 4, 0)", r"Q(\pm 4, 0), \mu=3"),
    (r"B(1,0), D(0,2)", "D(0,2), B(1,0)"),
    (r"C(4,7)", "(4,7)"),
    (r"\begin{pmatrix} 4 \\ -6 \end{pmatrix}", "(4,-6)^T"),
    (r"\begin{pmatrix} 4 \\ -6 \end{pmatrix}", r"\begin{pmatrix} 4 & -6 \end{pmatrix}^{\top}"),
    (r"\begin{pmatrix} 4 \\ -6 \end{pmatrix}", "[4,-6]"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[[1,2],[3,4]]"),
    # all reals but
    (r"x \ne -2, 5", r"\mathbb{R} \setminus \{-2, 5\}"),
    (r"x \ne \pm 5", r"(-\infty,-5) \cup (-5,5) \cup (5,\infty)"),
    (r"\mathbb{R} \setminus \{5\}", "all reals but 5"),
    (r"x \ne -2, 5", r"\text{all real numbers except } x=-2 \text{ and } x=5"),
    (r"x > 5", r"\text{all real } x > 5"),
    # sentences
    (r"\text{odd}", r"f(x) \text{ is odd}"),
    (r"\text{The function is odd}", r"\text{odd}"),
    (r"\text{ellipse}", "an ellipse"),
    # more of the above
    (r"17", r"\implies 17"),
    (r"17", r"17 \Box"),
    (r"17", r"\texttt{17}"),
    (r"17", r"17 \text{ years old}"),
    (r"17", r"17\ \mathrm{m/s}"),
    (r"17", r"17 \text{ for all } n"),
    (r"17", "17 for any n"),
    (r"8:40", "8{:}40"),
    (r"x-\frac12", r"x+-\frac12"),
    (r"x=\frac{\pi}{4}+\frac{k\pi}{2}, k \in \mathbb{Z}", r"x = k\pi \pm \frac{\pi}{4}, k \in \mathbb{Z}"),
    (r"(3,\infty)", "(3,oo)"),
    (r"f(x) = cx", r"f(x) = cx \text{ for some } c"),
    (r"x = \pi n", r"x = \pi n \text{ for any integer } n"),
    (r"17", "**17**"),
    (r"17", r"\text{Therefore, } 17"),
    (r"17", r"\text{Number of ways} = 17"),
    (r"17", r"17 \text{ different ways}"),
    (r"e^7", r"\exp(7)"),
    (r"\lceil \frac{y+1}{2} \rceil", "ceil((y+1)/2)"),
    (r"y \bmod 7", r"y \text{ mod } 7"),
    (r"3 \times 10^{-12}", "3×10⁻¹²"),
    (r"B, D", r"\text{(B) and (D)}"),
    (", ".join(map(str, range(1, 900))), ", ".join(map(str, range(899, 0, -1)))),
]
WRONG = [
    *((r"17", rf"17 \text{{ {words}}}") for words in ("halves", "sevenths", "misses", "is rejected", "squares of it")),
    (r"17", r"\text{the sum of } 17"),
    (r"7", "the 7th prime"),
    (r"7", r"7 \text{ quarters}"),
    (r"12,345,678", "(12, 345, 678)"),
    (r"345,678", "345, 678"),
    (r"17", "17 doubled"),
    (r"17", r"\text{not} = 17"),
    *((r"17", rf"17 \text{{ for }} {tail}") for tail in (r"\text{some } n", r"\text{large } n", "n = 3")),
    (r"17", r"17 \text{ for all but one } n"),
    (r"17", "17 for some n"),
    (r"17", r"17 \text{ only for } n=1"),
    (r"y^2+1", r"y^2+1 \bmod 2"),
    (r"17", "17 for big n"),
    (r"17", r"17 \text{ where possible}"),
    (r"f(x) = cx", r"f(x) = cx \text{ for some } x"),
    (r"17", r"17 \text{ with probability } \frac12"),
    (r"17", r"17 \text{ where } x = 2 \text{ is excluded}"),
    (r"n^2", r"n^2 \text{ for some } n"),
    (r"x > 5", r"x > 5 \text{ for some } x"),
    (r"12,345", "(12,345)"),
    (r"x \equiv 2 \pmod 5", "x = 2"),
    ("(1, 3)", r"\text{minimum: } 3, \text{ maximum: } 1"),
    (r"x=k^2\pi, k \in \mathbb{Z}", r"x=(k+1)^2\pi, k \in \mathbb{Z}"),
    (r"x=2k, k \in \mathbb{Z}", r"x=2k \text{ or } x = 1001k, k \in \mathbb{Z}"),
    (r"B", r"\text{B pentagon}"),
    (r"B", r"\text{B: not this one}"),
    (r"B", "B: or C"),
    (r"\lceil \frac{m}{4} \rceil", r"\lfloor \frac{m}{4} \rfloor + 1"),
    (r"\lfloor \frac{m}{300} \rfloor", r"\lfloor \frac{m}{299} \rfloor"),
    (r"\lfloor \log_{10} m \rfloor", r"\lceil \log_{10} m \rceil - 1"),
    (r"\lfloor \sqrt{m} \rfloor", r"\lfloor \sqrt{q} \rfloor"),
    (r"m \bmod 6", "m"),
    (r"\sqrt{9^{400}-1}", r"3^{400}"),
    (r"\sqrt[3]{8^{300}+1}", r"2^{300}"),
    (r"8:40", "1:5"),
    (r"6:05", "6:5"),
    (r"7,\! 250", "7, 250"),
    (r"\{2,4,6\}", r"\{2,4\} \cup \{6,8\}"),
    (r"A, C, D", "A, C"),
    (r"A, C, D", r"A, C \text{ or } D"),
    *(
        (r"17", text)
        for text in ("17以上", "不是17", "第17个", "17倍", r"17\text{ Drittel}", r"\text{casi } 17", "17...")
    ),
    (r"17", r"17 \text{ oder } 18"),
    (r"C", r"\text{(C) is false}"),
    (r"C", "C - 1"),
    (r"12,345,678", "(12,345,678)"),
    (r"(1,234)", "1234"),
    (r"8:40", r"\frac15"),
    (r"(4,-6)", "Q(-6,4)"),
    (r"Q(4,-6)", "R(4,-6)"),
    (r"B(1,0), D(0,2)", "B(0,2), D(1,0)"),
    (r"C(4,7)", "C(2,9)"),
    (r"(4,-6)", "(-6,4)^T"),
    (r"\{4,-6\}", "(4,-6)^T"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[[1,3],[2,4]]"),
    (r"\begin{pmatrix} 4 \\ -6 \end{pmatrix}", r"\begin{pmatrix} 4 & -6 \end{pmatrix}"),
    (r"x \ne -2, 5", r"x \ne -2 \text{ or } x \ne 5"),
    (r"x \ne 5", r"\text{all integers } x \ne 5"),
    (r"x \ne 5", r"\text{all real numbers except possibly } 5"),
    (r"\text{odd}", r"f \text{ is not odd}"),
    (r"\text{odd}", r"\text{the function is odd or even}"),
    (r"17", r"\text{Half of the number of ways} = 17"),
    (r"17", r"\text{So, } 17, 18"),
    (r"(1+\sqrt2)^{900}", r"(1+\sqrt2)^{900} + (1-\sqrt2)^{900}"),
    (r"\cosh 400", r"\sinh 400"),
    (", ".join(map(str, range(1, 900))), ", ".join(map(str, range(899)))),
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(20.0)
    yield made
    made.close()


def judged(verifier: MathVerifier, gold: str, answer: str) -> str:
    problem = Problem("p", "here", "math", (Message("user", "?"),), json.dumps([gold]), {}, "here:1")
    return verifier.verify(problem, rf"</think> So it is $\boxed{{{answer}}}$.", truncated=False).status


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_right_in_another_form(verifier: MathVerifier, gold: str, answer: str) -> None:
    assert judged(verifier, gold, answer) == "right"


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_another_answer_is_not_right(verifier: MathVerifier, gold: str, answer: str) -> None:
    assert judged(verifier, gold, answer) != "right"


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
        ("The answer is 17?", None),
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
        ("La respuesta final es 17.", "17"),
        ("したがって、答えは **17** です。", "17  です"),
        ("故选：B。", "B"),
        ("Perhaps the answer is 17.", None),
        ("Suppose the answer is 17.", None),
        ("The wrong answer is 17.", None),
        ("The square of the answer is 17.", None),
        ("-answer = 17", None),
        ("答案不是17", None),
        ("Equation 17", None),
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
