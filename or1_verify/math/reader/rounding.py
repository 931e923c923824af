"""Implements ``verify.math.rounding``: an exact answer is right if it rounds to the digits of a decimal gold.

A decimal answer is not exact, so 85.7 and 85.714 stay wrong for the gold 85.71: they show fewer or more digits. A
rational answer must be a finished number. An irrational answer may have roots, pi and e, but no logarithm or sine,
because the question may ask for the value of a logarithm or sine.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

import mpmath

from or1_verify.math.reader.answer_types import Conditional, Reading, Relation, Several
from or1_verify.math.reader.expression_tree import Node, operations, symbols
from or1_verify.math.reader.numerals import decimals, is_numeral
from or1_verify.math.reader.numeric_value import rational, real
from or1_verify.math.reader.quantity import Quantity, factors
from or1_verify.math.reader.words import UNITS

_MIN_DIGITS = 2
"""A gold with one significant digit, such as 0.5, is not read as rounded: too many values round to it."""

_CLOSED_FORM = frozenset({"num", "sym", "pi", "neg", "add", "mul", "div", "pow", "root", "mixed"})


def as_rounded(gold: Reading) -> Reading:
    """Return the gold with its decimals marked as rounded, also those in lists and tuples and behind ``x =``."""
    if isinstance(gold, Quantity):
        return replace(gold, rounded=True) if _significant_digits(gold.tree) >= _MIN_DIGITS else gold
    if isinstance(gold, Several):
        return replace(gold, items=tuple(map(as_rounded, gold.items)))
    if isinstance(gold, Relation) and set(gold.operators) == {"="}:
        return replace(gold, sides=tuple(map(as_rounded, gold.sides)))
    if isinstance(gold, Conditional):
        return replace(gold, value=as_rounded(gold.value))
    return gold


def rounds_to(answer: Quantity, gold: Quantity) -> bool:
    """Return whether an exact answer, converted to the gold's unit, rounds (half away from zero) to the gold."""
    value, shown = _exact(answer.tree), rational(gold.tree)
    if value is None or shown is None:
        return False
    one_unit = UNITS["degree"] in (gold.unit, answer.unit) and None in (gold.unit, answer.unit)
    if (one_unit and "pi" in operations(answer.tree)) or (answer.percent and not gold.percent):
        return False
    digits = decimals(gold.tree)
    return any(_rounded(value * factor, digits) == shown for factor in factors(gold, answer))


def _significant_digits(tree: Node) -> int:
    inner = tree.args[0] if tree.op in ("neg", "pm") else tree
    return len(inner.name.replace(".", "").lstrip("0")) if decimals(inner) else 0


def _exact(tree: Node) -> Fraction | None:
    """Return an exact answer's value, to 50 digits if it is irrational; None if the answer is not exact."""
    if symbols(tree) or _has_decimals(tree) or not operations(tree) <= _CLOSED_FORM:
        return None
    exact = rational(tree)
    if exact is not None:
        return exact if is_numeral(tree) else None
    value = real(tree)
    return None if value is None else Fraction(mpmath.nstr(value, 50))


def _has_decimals(tree: Node) -> bool:
    """Return whether the tree has a finite decimal. A repeating decimal is exact, so it does not count."""
    return any(node.op == "num" and re.match(r"\d*\.\d+(?![\d.\\])", node.name) for node in tree.walk())


def _rounded(value: Fraction, digits: int) -> Fraction:
    size = Fraction(math.floor(abs(value) * 10**digits + Fraction(1, 2)), 10**digits)
    return size if value >= 0 else -size
