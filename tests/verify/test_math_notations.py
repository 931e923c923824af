r"""Notations that need both texts, or words: vectors, derivatives, constants, ordinals, units, sets in words.

Each rule is held from both sides: what says the same, and near misses. Not proven: rates on answers of models; the
labelled pairs are in test_math_rules.
"""

from __future__ import annotations

import pytest

from or1_verify.math.reader.judge import judge
from or1_verify.math.reader.text import Unreadable

CROSS = r"\mathbf{a}\times\mathbf{b}"
DOT = r"\mathbf{a}\cdot\mathbf{b}"
RIGHT = [
    # vectors
    *((CROSS, answer) for answer in (r"\vec{a}\times\vec{b}", r"a \times b", r"\boldsymbol a\times\boldsymbol b")),
    *((DOT, answer) for answer in (r"a\cdot b", r"\mathbf b \cdot \mathbf a")),
    (r"\mathbf{F}=q\mathbf{v}\times\mathbf{B}", r"F=q(v\times B)"),
    (r"\mathbf{F}=m\mathbf{a}", "F=ma"),
    (r"\mathbf{v}=(1,2)", "v=(1,2)"),
    (r"\mathbf{v}=(1,2)", r"\vec{v}=(1,2)"),
    (
        r"\mathbf a\times\mathbf b=\begin{pmatrix}1\\2\end{pmatrix}",
        r"\mathbf a\times\mathbf b=\begin{bmatrix}1\\2\end{bmatrix}",
    ),
    (r"3\times\mathbf{x}", "3x"),
    (r"\angle ABC", r"\angle CBA"),
    # derivatives and constants
    ("y'+2y=0", r"\frac{dy}{dx}+2y=0"),
    ("y''+y=0", r"\frac{d^2y}{dx^2}+y=0"),
    (r"\frac{dy}{dt}=ky", "y'=ky"),
    ("f'(x)=2x", r"\frac{df}{dx}=2x"),
    ("y=Ce^{2x}", "y=ke^{2x}"),
    ("x^2+C", "x^2+c"),
    ("y=C_1e^x+C_2e^{-x}", "y=c_1e^{x}+c_2e^{-x}"),
    (r"(t,2t,3t), t\in\mathbb{R}", "(s,2s,3s)"),
    # ordinals
    (r"3^{rd}", r"\text{third}"),
    (r"\text{first quadrant}", r"\text{Quadrant I}"),
    (r"\text{Quadrant IV}", r"\text{the fourth quadrant}"),
    (r"\text{second quadrant}", r"2\text{nd quadrant}"),
    (r"\text{5th term}", r"\text{fifth term}"),
    # integers, however they are declared
    *(
        (r"n\pi", rf"x=k\pi {declared}")
        for declared in (
            "(k integer)",
            r"\text{ (k integer)}",
            r"\text{ ($k$ an integer)}",
            ", k integer",
            "where k is an integer",
            r"\quad (k \in \mathbb Z)",
            r"(k \in Z)",
            r"(k \in \mathbf{Z})",
            r"(k \in \Bbb Z)",
            r"\ (k=0,\pm1,\pm2,\dots)",
            r", k=0, \pm 1, \pm 2, \pm 3, \ldots",
        )
    ),
    (r"x\in\mathbb{R}", r"x\in\mathbb R"),
    (r"\mathbb{R}\setminus\{0\}", r"\mathbb R \setminus \{0\}"),
    # units and numbers in words
    (r"9.8 \text{ m/s}^2", r"9.8\ \mathrm{m\,s^{-2}}"),
    (r"9.8 \text{ m/s}^2", r"9.8\text{ m s}^{-2}"),
    (r"60 \text{ km/h}", r"60\text{ km h}^{-1}"),
    (r"3 \text{ kJ}", r"3000 \text{ J}"),
    (r"5 \text{ N}", r"5 \text{ newtons}"),
    (r"5 \text{ N}", "5"),
    (r"8 \text{ years}", r"8 \text{ yrs}"),
    (r"1.2 \text{ million}", "1,200,000"),
    (r"\$5 \text{ million}", r"5{,}000{,}000 \text{ dollars}"),
    # sets
    (r"[-1,1]", r"x\ge -1 \text{ and } x \le 1"),
    (r"(-3,-1)\cup(-1,\infty)", r"x>-3, x\ne -1"),
    (r"(-3,-1)\cup(-1,\infty)", r"\{x \mid x>-3 \text{ and } x\neq -1\}"),
    (r"(-\infty,-2)\cup(2,\infty)", r"\mathbb{R}\setminus[-2,2]"),
    (r"(-\infty,3)\cup(3,\infty)", r"\text{all real numbers except } 3"),
    (r"(0,\infty)", r"\mathbb{R}_{>0}"),
    (r"[0,\infty)", r"\mathbb{R}_{\ge 0}"),
    (r"\{k\pi : k\in\mathbb{Z}\}", r"x=n\pi, n \in \mathbb{Z}"),
    (r"\{k\pi \mid k\in\mathbb{Z}\}", r"\{n\pi \mid n\in\mathbb{Z}\}"),
]
WRONG = [
    # vectors
    *(
        (CROSS, answer)
        for answer in (DOT, r"\mathbf{b}\times\mathbf{a}", r"a\cdot b", "ab", r"\mathbf{ab}", "b\\times a")
    ),
    *((DOT, answer) for answer in (CROSS, r"a \times b", r"\vec a \times \vec b")),
    (r"(\vec a+\vec b)\times\vec c", r"(\vec a+\vec b)\cdot\vec c"),
    (r"|\mathbf a\times\mathbf b|", r"|\mathbf a\cdot\mathbf b|"),
    (r"\mathbf{A \times B}", r"\mathbf{A \cdot B}"),
    (r"{\bf a}\times{\bf b}", r"{\bf a}\cdot{\bf b}"),
    (r"\mathbf{r}\times m\mathbf{v}", r"\mathbf{r}\cdot m\mathbf{v}"),
    (r"\mathbf{a}\cdot(\mathbf{b}\times\mathbf{c})", r"\mathbf{a}\times(\mathbf{b}\times\mathbf{c})"),
    (r"\mathbf{a}\cdot(\mathbf{b}\times\mathbf{c})", r"(\mathbf{a}\cdot\mathbf{b})\mathbf{c}"),
    (r"\hat i\times\hat j", r"\hat i\cdot\hat j"),
    (r"q\mathbf v\times\mathbf B", r"q\mathbf B\times\mathbf v"),
    (r"\angle ABC", r"\angle BAC"),
    # derivatives and constants
    ("y'+2y=0", r"\frac{dy}{dx}-2y=0"),
    ("y'=xy", r"\frac{dy}{dt}=xy"),
    ("y''+y=0", r"\frac{dy}{dx}+y=0"),
    ("y'=2x", r"\frac{dx}{dy}=2x"),
    ("f'(x)=2x", "f(x)=2x"),
    ("f'(x)=2x", "y=2x"),
    ("y=Ce^{2x}", "y=ke^{3x}"),
    ("y=Ce^{2x}", "y=ne^{2x}"),
    ("y=C_1e^x+C_2e^{-x}", "y=c_1e^{x}+c_1e^{-x}"),
    ("C(x)=5x+3", "A(x)=5x+3"),
    ("C=2x", "A=2x"),
    ("y=cx", "y=kx"),
    ("AC", "AB"),
    (r"(t,2t,3t), t\in\mathbb{R}", "(s,2s,4s)"),
    # integers, however they are declared
    *(
        (r"2n\pi", rf"x=k\pi {declared}")
        for declared in (
            "(k integer)",
            r"\text{ ($k$ an integer)}",
            "where k is an integer",
            r"\quad (k \in \mathbb Z)",
            r"(k \in Z)",
            r"\ (k=0,\pm1,\pm2,\dots)",
        )
    ),
    (r"n\pi", r"x=k\pi, k=0,1,2,\ldots"),
    (r"n\pi", r"x=k\pi (k \in \mathbb R)"),
    (r"n\pi", r"x=k\pi, k=0, \pm 1"),
    (r"n\pi", r"x=k\pi, k=0,\pm2,\pm4,\ldots"),
    ("n^2", r"k^2, \text{ where } k \text{ is a non-integer}"),
    # ordinals
    (r"3^{rd}", r"\text{fourth}"),
    (r"\text{first quadrant}", r"\text{Quadrant II}"),
    (r"\text{second quadrant}", r"\text{second term}"),
    ("3", r"\text{third}"),
    (r"\frac13", r"\text{third}"),
    # units and numbers in words
    (r"9.8 \text{ m/s}^2", r"9.8\text{ m s}^{-1}"),
    (r"9.8 \text{ m/s}^2", r"9.8\text{ m s}"),
    (r"60 \text{ km/h}", r"60\text{ m h}^{-1}"),
    (r"5 \text{ N}", r"5 \text{ J}"),
    (r"3 \text{ kJ}", r"3 \text{ J}"),
    (r"5 \text{ million}", "5"),
    ("5", r"5 \text{ million}"),
    (r"5 \text{ million}", r"5 \text{ billion}"),
    (r"5 \text{ million}", r"5x \text{ million}"),
    # sets
    (r"(-1,1)", r"x\ge -1 \text{ and } x \le 1"),
    (r"(-1,1)", r"x>-1 \text{ or } x<1"),
    (r"(-3,\infty)", r"x>-3, x\ne -1"),
    (r"[-1,1]", r"x\ge -1 \text{ and } y \le 1"),
    (r"(-\infty,-2)\cup(2,\infty)", r"\mathbb{R}\setminus(-2,2)"),
    (r"(-\infty,3)\cup(3,\infty)", r"\text{all real numbers except } 4"),
    (r"[0,\infty)", r"\mathbb{R}_{>0}"),
    (r"\{k\pi \mid k\in\mathbb{Z}\}", r"\{2n\pi \mid n\in\mathbb{Z}\}"),
    (r"A\cup B", r"A\cap B"),
]


def accepted(gold: str, answer: str) -> bool:
    try:
        return judge(gold, answer).right
    except Unreadable:
        return False


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_what_says_the_same(gold: str, answer: str) -> None:
    assert accepted(gold, answer) and accepted(gold, gold)


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_near_misses(gold: str, answer: str) -> None:
    assert not accepted(gold, answer)
