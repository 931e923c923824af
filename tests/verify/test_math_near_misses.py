r"""Near misses that were once accepted: solutions crossed, links and names lost, expressions that agree near 0 alone, a
question's integral as its own answer. Beside them what must stay right.

Each is held through the worker, where Math-Verify judges what the reader cannot read. Not proven: rates on answers of
models.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

TWO = r"x = 1, y = 2 \text{ or } x = 3, y = 4"
SYSTEMS = r"\begin{cases}x=1\\y=2\end{cases} \text{ or } \begin{cases}x=2\\y=1\end{cases}"
WRONG = [
    # solutions of a system, crossed
    (TWO, r"x = 1, y = 4 \text{ or } x = 3, y = 2"),
    (TWO, r"x = 1 \text{ or } 3, y = 2 \text{ or } 4"),
    (r"a = 1, b = 2 \text{ or } a = 2, b = 1", r"a = 1, b = 1 \text{ or } a = 2, b = 2"),
    (r"p=3, q=-2 \text{ or } p=-3, q=2", r"p=3, q=2 \text{ or } p=-3, q=-2"),
    (
        r"x=3 \text{ and } y=1 \text{ or } x=1 \text{ and } y=3",
        r"x=3 \text{ and } y=3 \text{ or } x=1 \text{ and } y=1",
    ),
    (SYSTEMS, r"\begin{cases}x=1\\y=1\end{cases} \text{ or } \begin{cases}x=2\\y=2\end{cases}"),
    (SYSTEMS, r"\begin{cases}x=1\\x=2\end{cases} \text{ or } \begin{cases}y=2\\y=1\end{cases}"),
    # signs and names that belong together
    (r"a = \pm 1, b = \mp 2", r"a = \pm 1, b = \pm 2"),
    (r"x=\pm1, y=\pm2", r"x=\pm1, y=\mp2"),
    (r"x = 2 \pm i, y = 1 \mp i", r"x = 2 \pm i, y = 1 \pm i"),
    (r"(x,y) = (1,2) \text{ or } (3,4)", r"(y,x) = (1,2) \text{ or } (3,4)"),
    (r"(p,q) = (2,3), (5,7)", r"(a,b) = (2,3), (5,7)"),
    (r"|AB| = 5", r"|AC| = 5"),
    (r"S_1 : S_2 = 1:4", r"S_2 : S_1 = 1:4"),
    (r"a:b:c = 1:2:3", r"a:c:b = 1:2:3"),
    # what is excluded, and bounds
    (r"x \neq 1, 2", r"x \ne 1, x = 2"),
    (r"x \ne 0, 4", r"x \ne 0, t = 4"),
    (r"k \ne 1 \text{ and } k \ne 2", r"k \ne 1 \text{ or } k \ne 2"),
    # an interval or a point for several values
    ("-1, 4", r"x \in (-1, 4)"),
    (r"x=-1 \text{ or } x=4", r"x \in (-1, 4)"),
    (r"x=-1 \text{ or } x=4", "(-1,4)"),
    ("(-3, 5)", r"-3 \text{ or } 5"),
    ("(-3, 5)", "x=-3, x=5"),
    # expressions that differ far from 0
    ("x+10", "|x+10|"),
    ("y = x+3", r"y = \sqrt{(x+3)^2}"),
    (r"\sqrt{x^2+2x+1}", "x+1"),
    ("|x-10|", "10-x"),
    ("|x+2|+|x+3|", "2x+5"),
    (r"\max(x,10)", "10"),
    # a question as its own answer
    ("e^2-1", r"\int_0^2 e^x dx"),
    (r"\ln 2", r"\int_1^2 \frac{1}{x} dx"),
    (r"\frac{x^3}{3}+C", r"\int x^2\,dx + C"),
    (r"3\sqrt3-1", r"\begin{vmatrix}3&1\\1&\sqrt3\end{vmatrix}"),
    # residues
    ("3", r"x \equiv 3 \pmod 2"),
    ("3", r"3 \bmod 2"),
    (r"x \equiv 3 \pmod 7", r"y \equiv 3 \pmod 7"),
    (r"x \equiv 3 \pmod 7", r"x^2 \equiv 3 \pmod 7"),
    # sets of sets
    (r"\{1,\{2\}\}", r"\{1,2\}"),
    (r"\{\{1\},\{2\}\}", r"\{1,2\}"),
    (r"\{\{1\}\}", r"\{1\}"),
    (r"\{\emptyset,\{1\}\}", r"\{\emptyset,1\}"),
    # other numbers in words
    ("12", r"12 \text{ pi}"),
    ("12", r"12 \text{ lakh}"),
    ("12", r"12 \text{ tenths}"),
    ("3^{rd}", r"\text{third last}"),
    ("1:2", r"0.5\%"),
    # formulas with something added
    ("n^2", "n^2 = n"),
    ("n^2", "n = n^2"),
    ("n^2", r"n^2 \text{ for } n \text{ even}"),
    ("1023", "x^2 = 1023"),
    ("1023", r"\sin x = 1023"),
]
RIGHT = [
    (TWO, r"x = 3, y = 4 \text{ or } x = 1, y = 2"),
    (TWO, r"(x,y) = (1,2) \text{ or } (x,y) = (3,4)"),
    (TWO, "(1,2),(3,4)"),
    (TWO, r"\begin{cases}x=1\\y=2\end{cases} \text{ or } \begin{cases}x=3\\y=4\end{cases}"),
    (SYSTEMS, "(1,2),(2,1)"),
    (r"a = \pm 1, b = \mp 2", r"a = \mp 1, b = \pm 2"),
    (r"(x,y) = (1,2) \text{ or } (3,4)", "(1,2),(3,4)"),
    (r"|AB| = 5", r"|BA| = 5"),
    (r"|AB| = 5", "5"),
    (r"S_1 : S_2 = 1:4", "1:4"),
    (r"x \neq 1, 2", r"x \ne 2, x \ne 1"),
    (r"x \neq 1, 2", r"x \ne 1 \text{ and } x \ne 2"),
    ("-1, 4", "x=-1, x=4"),
    ("-1, 4", r"x \in \{-1, 4\}"),
    ("(-3, 5)", "x=-3, y=5"),
    (r"\sqrt{x^2+2x+1}", "|x+1|"),
    ("|x-10|", "|10-x|"),
    (r"\frac{1}{\sqrt{x^2+1}+x}", r"\sqrt{x^2+1}-x"),
    (r"\frac{1}{\sqrt{x^6+1}+x^3}", r"\sqrt{x^6+1}-x^3"),
    (r"\frac{1}{\sqrt{x^{12}+1}+x^6}", r"\sqrt{x^{12}+1}-x^6"),
    (r"\int_0^2 e^x dx", r"\int_0^2 e^x dx"),
    ("3", r"3 \pmod 7"),
    (r"x \equiv 3 \pmod 7", r"3 \pmod 7"),
    (r"\{\{1\},\{2\}\}", r"\{\{2\},\{1\}\}"),
    ("12", r"12 \text{ pairs}"),
    ("3^{rd}", r"\text{third place}"),
    ("n^2", r"n^2 \text{ for all integers } n"),
    ("1023", "a+b = 1023"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_what_says_the_same(is_right: Callable[[str, str], bool], gold: str, answer: str) -> None:
    assert is_right(gold, answer) and is_right(gold, gold)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_near_misses(is_right: Callable[[str, str], bool], gold: str, answer: str) -> None:
    assert not is_right(gold, answer) and is_right(gold, gold)
