r"""What an answer says about its letters: integers or reals, bounds, the domain of a function; and words around sets.

Each rule is held from both sides, through the worker as well, where Math-Verify judges what the reader cannot read.
Not proven: rates on answers of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from or1_megatron.types import Message, Problem
from or1_megatron.verify.math.verifier import MathVerifier

FAMILY = r"x=k\pi, k \in \mathbb{Z}"
ODD = r"x=2k+1, k \in \mathbb{Z}"
SQUARE = r"f(x)=x^2"
THREES = r"n = 3k+1, k \in \mathbb{Z}"
SIGNED = r"x=(-1)^k\frac\pi6+k\pi, k\in\mathbb Z"
FROM_3 = r"n \ge 3, n \in \mathbb{N}"
WRONG = [
    # the unknown over the integers is another set
    (r"\{x \mid x>0\}", r"x>0, x \in \mathbb{Z}"),
    (r"x>0, x \in \mathbb{Z}", "x>0"),
    (r"x>0, x \in \mathbb{Z}", r"x>0 \text{ and } x \in \mathbb{N}"),
    (r"x>0", r"x>0 \text{ and } x \in \mathbb{Z}"),
    (r"(0,\infty)", r"x>0, x\in\mathbb{N}"),
    (r"(0,\infty)", r"x>0, x\in\mathbb{N}^*"),
    (r"x>0, x \in \mathbb{Z}", r"x>0, x\in\mathbb{R}"),
    (r"-1 \le x \le 2", r"-1 \le x \le 2 \text{ where } x \text{ is an integer}"),
    (r"-1 \le x \le 2, x \in \mathbb{Z}", "-1,0,1"),
    (r"x<0 \text{ or } x>5", r"x<0 \text{ or } x>5, x \in \mathbb{Z}"),
    (r"x>y, x \in \mathbb{Z}", "x>y"),
    (r"(0,5)", r"(0,5) \text{ with } x\in\mathbb{Z}"),
    (r"x>0, x \in \mathbb{Z}", "1,2,3"),
    (r"0<x<3, x\in\mathbb{Z}", "0,1,2"),
    # a parameter over other numbers
    (ODD, r"x=2k+1, k \in \mathbb{N}"),
    (r"x=2k+1, k \in \mathbb{N}", ODD),
    (ODD, r"x=2n+1, n \in \mathbb{N}"),
    (ODD, r"x=2k+1, k \ge 0"),
    (r"x=2k+1, k \ge 0", ODD),
    (ODD, r"x=2k+1, k\in\mathbb{Z}, k \ge 0"),
    (ODD, r"x=2k+1 \text{ for } k \ge 0"),
    (ODD, r"x=2k+1 \text{ where } k \text{ is a positive integer}"),
    (ODD, r"x=2k+1 \text{ for positive integers } k"),
    (r"\{2k+1 \mid k \in \mathbb{Z}\}", r"\{2k+1 \mid k \in \mathbb{N}\}"),
    (FAMILY, r"x=k\pi, k \in \mathbb{R}"),
    (FAMILY, r"x=k\pi \text{ for some real } k"),
    (FAMILY, r"x=k\pi, k \ne 0"),
    (FAMILY, r"x=k\pi, k \in \mathbb{Z}, k \ne 0"),
    (FAMILY, r"x=k\pi, k \in \mathbb{Z}\setminus\{0\}"),
    (FAMILY, r"x=k\pi \text{ where } k=0"),
    (FAMILY, r"x=k\pi \text{ where } k \text{ is even}"),
    (r"x=k\pi", r"x=k\pi, k \in \mathbb{N}"),
    (r"x=k\pi", r"x=k\pi \text{ where } k=0"),
    (r"x=\frac\pi4+k\pi, k\in\mathbb Z", r"x=\frac{3\pi}4+k\pi, k\in\mathbb Z"),
    (r"x=\frac\pi4+k\pi, k\in\mathbb Z", r"x=\frac{5\pi}4+2k\pi, k\in\mathbb Z"),
    (r"x=\frac\pi4+k\pi, k\in\mathbb N", r"x=\frac{5\pi}4+k\pi, k\in\mathbb N"),
    (r"x=\frac\pi4+k\pi, k \ge 0", r"x=\frac{5\pi}4+k\pi, k\in\mathbb Z"),
    ("x=4+k", "x=5+k"),
    (r"a_k=k\pi, k\in\mathbb Z", r"a_k=(k+1)\pi, k\in\mathbb Z"),
    (r"f(k)=k\pi, k\in\mathbb Z", r"f(k)=(k+1)\pi, k\in\mathbb Z"),
    (r"n^2, n\in\mathbb Z", "(n+1)^2"),
    (r"n^2, n\in\mathbb Z", r"(n+1)^2, n\in\mathbb Z"),
    (r"y=2n+1, n\in\mathbb Z", r"y=2n+3, n\in\mathbb Z"),
    # a function's domain
    (SQUARE + r" \text{ for } x \in [0,1]", SQUARE + r" \text{ for } x \in [5,6]"),
    (SQUARE + r" \text{ with domain } [0,1]", SQUARE + r" \text{ with domain } (0,1)"),
    (SQUARE + r" \text{ with domain } [0,1]", SQUARE + r" \text{ on } (0,1)"),
    (SQUARE + r" \text{ for all real } x", SQUARE + r" \text{ for } x>0"),
    (SQUARE + r", x \in \mathbb{R}", SQUARE + ", x>0"),
    (SQUARE + r", x\ge0", SQUARE + r" \text{ on } (0,\infty)"),
    (SQUARE + r" \text{ for } x>0", SQUARE + r" \text{ where } x \text{ is negative}"),
    (r"y=x^2 \text{ where } x\in\mathbb R", r"y=x^2 \text{ where } x=0"),
    (r"y=x^2", r"y=x^2 \text{ where } x=0"),
    (r"y=2x", r"y=2x \text{ for } y=4"),
    (r"y=2x", r"y=2x, x \in \{1,2\}"),
    (r"y=2x", r"y=2x, x \in \mathbb{Z}"),
    (r"x^2+y^2=1", r"x^2+y^2=1, x \in \mathbb{Z}"),
    (THREES, r"n = 3m-1, m \in \mathbb{Z}"),
    (THREES, r"n = 6m+1, m \in \mathbb{Z}"),
    (SIGNED, r"x=\frac\pi6+k\pi \text{ or } x=\frac{5\pi}6+2k\pi, k\in\mathbb Z"),
    (r"x = 60^\circ + 180^\circ n, n \in \mathbb{Z}", r"x = 240^\circ + 360^\circ k, k \in \mathbb{Z}"),
    (r"x=\frac\pi6+2k\pi, k\in\mathbb Z", r"x=\arcsin(\frac12)+2k\pi, k\in\mathbb Z"),
    (r"x=\frac\pi4+k\pi, k\in\mathbb Z", r"x=\frac\pi4+k\pi+10^{-30}, k\in\mathbb Z"),
    (r"x=k\sqrt2, k\in\mathbb Z", r"x=1.41421356237k, k\in\mathbb Z"),
    (r"x=k^2\pi, k\in\mathbb Z", r"x=(k+1)^2\pi, k\in\mathbb Z"),
    (r"x=k\pi, y=2k, k\in\mathbb Z", r"x=k\pi+\pi, y=2k+2, k\in\mathbb Z"),
    # integers by a bound
    (FROM_3, r"n > 3, n \in \mathbb{N}"),
    (FROM_3, r"\{2, 3, 4, \ldots\}"),
    (FROM_3, r"\{3, 4, 6, \ldots\}"),
    (FROM_3, r"\{3, 4, 5\}"),
    (FROM_3, r"\{3, 4, 5, \ldots, 100\}"),
    (FROM_3, r"\{5, 4, 3, \ldots\}"),
    (FROM_3, r"[3, \infty)"),
    (r"x \in \mathbb{Q}, x > 2", r"x \ge 3, x \in \mathbb{Q}"),
    (r"x \in \mathbb{Q}, x > 0", r"\{x \in \mathbb{R} : x > 0\}"),
    (r"\{x \in \mathbb{Q} \mid 0<x<3\}", r"\{1,2\}"),
    (r"x \in \mathbb{Q}, x > 0", r"\text{all positive real numbers}"),
    (r"(-\infty, 0)", r"\text{all negative integers}"),
    (r"(-\infty, 0)", r"\text{all positive real numbers}"),
    (r"n > 0, n \in \mathbb{Z}", r"\text{the non-negative integers}"),
    (r"2 \text{ radians}", r"2^\circ"),
    (r"2 \text{ radians}", r"2 \text{ degrees}"),
    (r"a_n=2n+1, n\in\mathbb{N}^*", r"a_n=2n+1, n \ge 2"),
    (r"a_n=2n+1, n\in\mathbb{N}^*", r"a_n=2n+1, n \ge 0"),
    # joined by another word
    (r"x \ge 0 \text{ and } y \ge 0", r"x \ge 0 \text{ or } y \ge 0"),
    (r"x \ge 0 \text{ or } y \ge 0", r"x \ge 0 \text{ and } y \ge 0"),
    (r"x>1 \text{ and } y<2", r"x>1 \text{ or } y<2"),
    (r"x>1 \text{ or } y<2", r"x>1 \text{ and } y<2"),
    (r"x>1, y<2", r"x>1 \text{ or } y<2"),
    (r"x=1, y=2", r"x=1 \text{ or } y=2"),
    (r"x>1 \text{ and } x<5", r"x>1 \text{ or } x<5"),
    (r"x>a \text{ and } x<b", r"x>a \text{ or } x<b"),
    # marks of arc
    ("30'", r"30^\circ"),
    ("20''", "20'"),
    ("5'", "5''"),
    ("30''", r"30^\circ"),
    (r"30^{\prime}", r"30^\circ"),
    ("f'(2)", "f(2)"),
    (r"45^\circ 30'", r"45 \text{ degrees and } 31 \text{ minutes}"),
    (r"45^\circ 30'", r"30 \text{ degrees and } 45 \text{ minutes}"),
    # sets, labels and dates in words
    (r"\mathbb{R}\setminus\{-1\}", r"\mathbb{R}-\{1\}"),
    (r"\mathbb{R}\setminus\{-1\}", r"\mathbb{R}-1"),
    (r"domain: (-\infty,\infty), range: [0,\infty)", r"\text{Domain: } y \ge 0, \text{ Range: all real numbers}"),
    (r"domain: (-\infty,\infty), range: [0,\infty)", r"\text{Domain: all real numbers, Range: } y>0"),
    (r"No solution: \varnothing", r"\text{There is one solution}"),
    (r"No solution: \varnothing", r"\text{There is no solution but } 2"),
    ("2", r"\text{There is no solution}"),
    (r"\{x \mid x<0\}", r"\text{all real numbers less than or equal to } 0"),
    (r"\{x \mid x<0\}", r"\text{all real numbers greater than } 0"),
    (r"\{x \mid x<0\}", r"\text{all real numbers less than } 0 \text{ or } 5"),
    (r"\{x \mid x<0\}", r"\text{all integers less than } 0"),
    (FAMILY, r"x \in \{2k\pi \mid k\in\mathbb Z\}"),
    (FAMILY, r"x \in \{k\pi \mid k\in\mathbb N\}"),
    (FAMILY, r"y \in \{k\pi \mid k\in\mathbb Z\}"),
    (r"\text{Minimum: } 1, \text{Maximum: } 3", r"\min=3,\ \max=1"),
    (r"\text{March 15}", r"\text{the 15th of May}"),
    (r"\text{March 15}", r"\text{the 16th of March}"),
    (r"12\text{ square meters}", r"12\,\text{cu. m}"),
    (r"12\text{ square meters}", r"12\,\text{sq. cm}"),
]
RIGHT = [
    (r"x>0, x \in \mathbb{Z}", r"\{x \in \mathbb{Z} \mid x>0\}"),
    (r"x>0, x \in \mathbb{Z}", r"x>0 \text{ where } x \text{ is an integer}"),
    (r"x>0, x \in \mathbb{Z}", r"x>0 \text{ and } x \in \mathbb{Z}"),
    (r"-1 \le x \le 2, x \in \mathbb{Z}", "-1,0,1,2"),
    (r"0<x<3, x\in\mathbb{N}", "1,2"),
    (r"a_n=2n+1, n\in\mathbb{N}^*", r"a_n=2n+1, n \ge 1"),
    (r"x>0, x \in \mathbb{R}", "x>0"),
    ("x>0", r"x>0, x \in \mathbb{R}"),
    (r"2k\pi<x<2k\pi+\pi, k \in \mathbb{Z}", r"2k\pi<x<2k\pi+\pi"),
    (r"x \ne k\pi, k \in \mathbb{Z}", r"x \ne k\pi"),
    (ODD, "x=2k+1"),
    ("x=2k+1", ODD),
    (ODD, r"x=2n+1 \text{ where } n \text{ is an integer}"),
    (r"x=2k+1, k \in \mathbb{N}", r"x=2n+1, n \in \mathbb{N}"),
    (r"x=2k+1, k \in \mathbb{N}^*", r"x=2k+1, k \in \mathbb{Z}^+"),
    (r"x=2k+1, k \in \mathbb{Z}^+", r"x=2k+1 \text{ where } k \text{ is a positive integer}"),
    (r"x=2k+1, k \ge 0", r"x=2k+1, k\in\mathbb{Z}, k \ge 0"),
    (r"a_n=2n-1", r"a_n=2n-1, n \in \mathbb{N}^*"),
    (r"a_n=2n-1, n \ge 1", r"a_n=2n-1"),
    (r"y=Ce^x", r"y=Ce^x \text{ where } C \text{ is an arbitrary constant}"),
    (r"y=Ce^x, C \in \mathbb{R}", r"y=Ce^x \text{ where } C \text{ is a constant}"),
    (r"y=\frac{k}{x}", r"y=\frac{k}{x}, k \ne 0"),
    (SQUARE + r" \text{ for } x \in [0,1]", SQUARE + r", 0 \le x \le 1"),
    (SQUARE + r" \text{ with domain } [0,1]", SQUARE + r" \text{ for } x \in [0,1]"),
    (SQUARE + r" \text{ for all real } x", SQUARE + r", x \in \mathbb{R}"),
    (SQUARE, SQUARE + r" \text{ for all real } x"),
    (SQUARE + r", x\ge0", SQUARE + r" \text{ on } [0,\infty)"),
    (r"x \ge 0 \text{ and } y \ge 0", r"y \ge 0, x \ge 0"),
    (r"x=1 \text{ or } x=2", r"x=1 \text{ and } x=2"),
    ("x_1=1, x_2=2", r"x_1=1 \text{ or } x_2=2"),
    ("30'", "30'"),
    (r"\mathbb{R}\setminus\{-1\}", r"\mathbb{R}-\{-1\}"),
    (r"domain: (-\infty,\infty), range: [0,\infty)", r"\text{Domain: all real numbers, Range: } y\ge0"),
    (r"No solution: \varnothing", r"\text{There is no solution}"),
    (r"\{x \mid x<0\}", r"\text{all real numbers less than } 0"),
    (r"[2,\infty)", r"\text{all real numbers greater than or equal to } 2"),
    (FAMILY, r"x \in \{k\pi \mid k\in\mathbb Z\}"),
    (r"\text{Minimum: } 1, \text{Maximum: } 3", r"\min=1,\ \max=3"),
    (r"45^\circ 30'", r"45 \text{ degrees and } 30 \text{ minutes}"),
    (r"\text{March 15}", r"\text{the 15th of March}"),
    (r"12\text{ square meters}", r"12\,\text{sq. m}"),
    (r"x=\frac\pi4+k\pi, k\in\mathbb Z", r"\frac{5\pi}4+k\pi, k\in\mathbb Z"),
    (r"x=\frac\pi4+k\pi, k\in\mathbb Z", r"x=\frac{5\pi}4-n\pi, n\in\mathbb Z"),
    (THREES, r"n = 3m-2, m \in \mathbb{Z}"),
    (THREES, r"n = 6m+1 \text{ or } n = 6m+4, m \in \mathbb{Z}"),
    (SIGNED, r"x=\frac\pi6+2k\pi \text{ or } x=\frac{5\pi}6+2k\pi, k\in\mathbb Z"),
    (r"x = 2k\pi \pm \frac\pi3, k\in\mathbb Z", r"x=\frac\pi3+2n\pi, x=\frac{5\pi}3+2n\pi, n\in\mathbb Z"),
    (r"x = 60^\circ + 180^\circ n, n \in \mathbb{Z}", r"x = 240^\circ + 180^\circ k, k \in \mathbb{Z}"),
    (r"x=\frac{k\pi}2, k\in\mathbb Z", r"x=k\pi \text{ or } x=\frac\pi2+k\pi, k\in\mathbb Z"),
    (FROM_3, r"n > 2, n \in \mathbb{N}"),
    (FROM_3, r"\{3, 4, 5, \ldots\}"),
    (r"m < -1, m \in \mathbb{Z}", r"\{\ldots, -4, -3, -2\}"),
    (r"m < -1, m \in \mathbb{Z}", r"\{-2, -3, -4, \ldots\}"),
    (r"x \in \mathbb{Q}, x > 0", r"\{x \in \mathbb{Q} : x > 0\}"),
    (r"x \in \mathbb{Q}, x > 0", r"\text{all positive rational numbers}"),
    (r"(-\infty, 0)", r"\text{all negative real numbers}"),
    (r"n \ge 0, n \in \mathbb{Z}", r"\text{the non-negative integers}"),
    (r"\frac{5\pi}6 \text{ radians}", r"\frac56\pi \text{ rad}"),
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    made = MathVerifier(timeout_s=60.0)
    yield made
    made.close()


def is_right(verifier: MathVerifier, gold: str, answer: str) -> bool:
    problem = Problem("id", "s", "math", (Message("user", "q"),), json.dumps([gold]), {}, "x.jsonl:1")
    return verifier.verify(problem, rf"</think>\boxed{{{answer}}}", truncated=False).status == "right"


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_what_says_the_same(verifier: MathVerifier, gold: str, answer: str) -> None:
    assert is_right(verifier, gold, answer) and is_right(verifier, gold, gold)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_near_misses(verifier: MathVerifier, gold: str, answer: str) -> None:
    assert not is_right(verifier, gold, answer)
