"""The example's mathematics: kinds of problems, each drawn with other numbers, with worked solutions."""

# ruff: noqa: E501  # a statement is one line

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple


class MathProblem(NamedTuple):
    statement: str
    answer: str
    solution: str


Kind = Callable[[random.Random], MathProblem]


def _worked(steps: str, answer: str) -> str:
    return f"{steps} Hence the answer is $\\boxed{{{answer}}}$."


def _fraction(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def linear_equation(rng: random.Random) -> MathProblem:
    a, b, x = rng.randint(3, 19), rng.randint(2, 60), rng.randint(2, 25)
    total = a * x + b
    text = f"A taxi charges a fixed ${b}$ coins plus ${a}$ coins for every mile. A ride costs ${total}$ coins in all. How many miles long is it?"
    return MathProblem(text, str(x), _worked(f"From ${a}x + {b} = {total}$ we get ${a}x = {total - b}$.", str(x)))


def quadratic_roots(rng: random.Random) -> MathProblem:
    p, q = sorted(rng.sample(range(-14, 15), 2))
    b, c = -(p + q), p * q
    text = f"The equation $x^2 {b:+d}x {c:+d} = 0$ has two real roots $r$ and $s$. Find the value of $r^2 + s^2$."
    value = str(p * p + q * q)
    return MathProblem(text, value, _worked(f"By Vieta $r^2+s^2 = ({-b})^2 - 2\\cdot({c})$.", value))


def greatest_divisor(rng: random.Random) -> MathProblem:
    g, a, b = rng.randint(4, 30), *rng.sample([7, 8, 9, 11, 13, 15, 16, 17], 2)
    text = f"Ribbons of length ${g * a}$ cm and ${g * b}$ cm shall be cut into equal pieces, as long as possible, with nothing left over. What is the length of a piece in centimetres?"
    value = str(math.gcd(g * a, g * b))
    return MathProblem(text, value, _worked(f"The length is $\\gcd({g * a}, {g * b})$.", value))


def power_remainder(rng: random.Random) -> MathProblem:
    base, exponent, modulus = rng.randint(2, 12), rng.randint(40, 400), rng.choice([7, 11, 13, 17, 19, 23])
    text = f"Compute the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$."
    value = str(pow(base, exponent, modulus))
    return MathProblem(text, value, _worked("Powers repeat with a period that divides one less than the prime.", value))


def committee(rng: random.Random) -> MathProblem:
    women, men, k = rng.randint(5, 9), rng.randint(4, 8), rng.randint(2, 3)
    text = f"From ${women}$ violinists and ${men}$ cellists a group of ${k}$ violinists and ${k}$ cellists is chosen. In how many ways can this be done?"
    value = str(math.comb(women, k) * math.comb(men, k))
    return MathProblem(
        text, value, _worked(f"$\\binom{{{women}}}{{{k}}}\\binom{{{men}}}{{{k}}}$ counts the choices.", value)
    )


def dice(rng: random.Random) -> MathProblem:
    faces, total = rng.randint(6, 12), rng.randint(5, 11)
    ways = sum(1 for i in range(1, faces + 1) if 1 <= total - i <= faces)
    value = _fraction(Fraction(ways, faces * faces))
    text = f"Two fair dice, each with faces numbered from 1 to {faces}, are rolled. What is the probability that the numbers shown add up to {total}?"
    return MathProblem(text, value, _worked(f"{ways} of {faces * faces} outcomes are favourable.", value))


def arithmetic_series(rng: random.Random) -> MathProblem:
    first, step, count = rng.randint(1, 20), rng.randint(2, 9), rng.randint(12, 60)
    text = f"An auditorium has {first} seats in its front row, and each row further back has {step} seats more than the one before it. With {count} rows altogether, how many seats are there?"
    value = str(count * (2 * first + (count - 1) * step) // 2)
    return MathProblem(
        text, value, _worked(f"The sum is ${count}(2\\cdot {first} + {count - 1}\\cdot {step})/2$.", value)
    )


def geometric_series(rng: random.Random) -> MathProblem:
    a, q = rng.randint(2, 40), rng.randint(2, 9)
    value = _fraction(Fraction(a * q, q - 1))
    text = f"An infinite geometric progression begins with ${a}$ and its common ratio is $\\frac{{1}}{{{q}}}$. Determine the sum of all its terms."
    return MathProblem(text, value, _worked(f"$a/(1-r) = {a}/(1 - 1/{q})$.", value))


def right_triangle(rng: random.Random) -> MathProblem:
    m, n = sorted(rng.sample(range(1, 12), 2), reverse=True)
    legs = (m * m - n * n, 2 * m * n)
    text = f"In triangle $ABC$ the angle at $C$ is a right angle, $AC = {legs[0]}$ and $BC = {legs[1]}$. Find the length of the hypotenuse."
    value = str(m * m + n * n)
    return MathProblem(text, value, _worked(f"By Pythagoras $AB^2 = {legs[0]}^2 + {legs[1]}^2$.", value))


def ring_area(rng: random.Random) -> MathProblem:
    inner = rng.randint(2, 15)
    outer = inner + rng.randint(1, 9)
    text = f"A circular pond of radius {inner} metres is surrounded by a path whose outer edge is a circle of radius {outer} metres about the same centre. Give the area of the path in square metres, in terms of $\\pi$."
    value = f"{outer * outer - inner * inner}\\pi"
    return MathProblem(text, value, _worked(f"$\\pi({outer}^2 - {inner}^2)$.", value))


def divisor_count(rng: random.Random) -> MathProblem:
    a, b, c = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
    n = 2**a * 3**b * 5**c
    text = f"How many positive divisors does the number ${n}$ have?"
    value = str((a + 1) * (b + 1) * (c + 1))
    return MathProblem(text, value, _worked(f"${n} = 2^{a}\\cdot 3^{b}\\cdot 5^{c}$.", value))


def other_base(rng: random.Random) -> MathProblem:
    base, n = rng.randint(3, 8), rng.randint(100, 900)
    digits, left = "", n
    while left:
        digits, left = str(left % base) + digits, left // base
    text = f"The numeral ${digits}$ is written in base {base}. Write the same number in base ten."
    return MathProblem(text, str(n), _worked(f"Expanding in powers of {base} gives {n}.", str(n)))


def trains(rng: random.Random) -> MathProblem:
    v, w, t = rng.randint(40, 90), rng.randint(40, 90), rng.randint(2, 6)
    text = f"Two trains leave stations {(v + w) * t} km apart at the same moment and run towards each other, one at {v} km/h, the other at {w} km/h. After how many hours do they meet?"
    return MathProblem(text, str(t), _worked(f"They approach at {v + w} km/h.", str(t)))


def pipes(rng: random.Random) -> MathProblem:
    a, b = sorted(rng.sample(range(3, 16), 2))
    value = _fraction(Fraction(a * b, a + b))
    text = f"One pump empties a cellar in {a} hours, another needs {b} hours for it. Working together from the start, how many hours do both pumps take?"
    return MathProblem(text, value, _worked(f"Together they do $1/{a} + 1/{b}$ of it in an hour.", value))


def mixture(rng: random.Random) -> MathProblem:
    litres, percent = rng.choice([10, 20, 30, 40, 50, 60]), rng.choice([10, 20, 25, 30, 40])
    value = _fraction(Fraction(litres * percent, 100 - percent))
    text = f"How many litres of pure syrup must be stirred into {litres} litres of water so that the drink is {percent}% syrup?"
    return MathProblem(text, value, _worked(f"$x = {percent}(x + {litres})/100$.", value))


def ages(rng: random.Random) -> MathProblem:
    child, k, later = rng.randint(4, 14), rng.randint(3, 5), rng.randint(2, 9)
    total = child * (k + 1) + 2 * later
    text = f"Marta is {k} times as old as her daughter Ines. In {later} years their ages will add up to {total}. How old is Ines today?"
    return MathProblem(text, str(child), _worked(f"${k + 1}d + {2 * later} = {total}$.", str(child)))


def lattice_paths(rng: random.Random) -> MathProblem:
    a, b = rng.randint(3, 9), rng.randint(3, 9)
    text = f"A rook stands in a corner of a board and walks to the opposite corner, {a} squares east and {b} squares north, one square at a time and never back. How many different walks are possible?"
    value = str(math.comb(a + b, a))
    return MathProblem(text, value, _worked(f"$\\binom{{{a + b}}}{{{a}}}$ orders of the moves.", value))


def composition(rng: random.Random) -> MathProblem:
    a, b, c, d, x = (rng.randint(2, 12) for _ in range(5))
    text = f"Let $f(x) = {a}x + {b}$ and $g(x) = {c}x - {d}$. Evaluate $f(g({x}))$."
    value = str(a * (c * x - d) + b)
    return MathProblem(text, value, _worked(f"$g({x}) = {c * x - d}$.", value))


def logarithm(rng: random.Random) -> MathProblem:
    base, p, q = rng.choice([2, 3, 5, 7]), rng.randint(2, 6), rng.randint(2, 6)
    text = f"Find the exact value of $\\log_{{{base}}} {base**p} \\cdot \\log_{{{base}}} {base**q}$."
    return MathProblem(text, str(p * q), _worked(f"The logarithms are {p} and {q}.", str(p * q)))


def inclusion(rng: random.Random) -> MathProblem:
    both, tea, coffee, none = rng.randint(3, 12), rng.randint(14, 30), rng.randint(14, 30), rng.randint(2, 9)
    text = f"In an office {tea} people drink tea, {coffee} drink coffee, {both} drink both, and {none} drink neither. How many people work there?"
    value = str(tea + coffee - both + none)
    return MathProblem(text, value, _worked(f"${tea} + {coffee} - {both} + {none}$.", value))


def clock(rng: random.Random) -> MathProblem:
    hour, minute = rng.randint(1, 11), rng.choice([10, 20, 30, 40, 50])
    angle = abs(Fraction(60 * hour + minute, 2) - 6 * minute)
    value = _fraction(min(angle, 360 - angle))
    text = f"What is the smaller angle, in degrees, between the hands of a clock at {hour}:{minute:02d}?"
    return MathProblem(text, value, _worked("The hour hand moves half a degree in a minute.", value))


def telescope(rng: random.Random) -> MathProblem:
    n, start = rng.randint(20, 200), rng.randint(2, 9)
    value = _fraction(Fraction(1, start) - Fraction(1, n + 1))
    text = f"Evaluate $\\sum_{{k={start}}}^{{{n}}} \\frac{{1}}{{k(k+1)}}$."
    return MathProblem(text, value, _worked(f"The sum telescopes to $1/{start} - 1/{n + 1}$.", value))


def trailing_zeros(rng: random.Random) -> MathProblem:
    n = rng.randint(40, 700)
    value = str(n // 5 + n // 25 + n // 125 + n // 625)
    text = f"In how many zeros does the decimal form of ${n}!$ end?"
    return MathProblem(text, value, _worked("Count the factors of five.", value))


def average_left(rng: random.Random) -> MathProblem:
    count, mean, drop = rng.randint(6, 15), rng.randint(20, 60), rng.randint(1, 4)
    left_out = count * mean - (count - 1) * (mean - drop)
    text = f"The average of {count} numbers is {mean}. When one of them is taken away the average of the rest is {mean - drop}. Which number was taken away?"
    return MathProblem(
        text, str(left_out), _worked(f"${count}\\cdot {mean} - {count - 1}\\cdot {mean - drop}$.", str(left_out))
    )


KINDS: tuple[Kind, ...] = (
    linear_equation, quadratic_roots, greatest_divisor, power_remainder, committee, dice, arithmetic_series,
    geometric_series, right_triangle, ring_area, divisor_count, other_base, trains, pipes, mixture, ages,
    lattice_paths, composition, logarithm, inclusion, clock, telescope, trailing_zeros, average_left,
)  # fmt: skip


def draw(seed: int, each: int) -> list[MathProblem]:
    """``each`` different problems of every kind, kinds in turn."""
    rng = random.Random(seed)
    found: dict[str, MathProblem] = {}
    for kind in KINDS:
        before = len(found)
        while len(found) < before + each:
            problem = kind(rng)
            found.setdefault(problem.statement, problem)
    ordered = list(found.values())
    return [ordered[kind * each + n] for n in range(each) for kind in range(len(KINDS))]
