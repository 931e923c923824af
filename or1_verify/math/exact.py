r"""Compares plain integers and fractions as exact rationals, without computer algebra.

This path exists for speed, so it decides only where it cannot be wrong: ``-12``, ``3/4``, ``\frac{3}{4}`` and
``-\dfrac{3}{4}`` with ASCII digits. Decimals, separators, units and everything else are left to ``math.reader``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_DIGITS = "[0-9]{1,300}"  # bounded: Python refuses to convert integers of more than 4300 digits
_INTEGER = re.compile(rf"-?{_DIGITS}")
_SLASH = re.compile(rf"(-?{_DIGITS})/({_DIGITS})")
_FRAC = re.compile(rf"(-?)\\[dt]?frac\{{(-?{_DIGITS})\}}\{{({_DIGITS})\}}")


def rational(text: str) -> Fraction | None:
    """Return the exact value of a plain integer or fraction; None for anything else and for division by zero."""
    if _INTEGER.fullmatch(text):
        return Fraction(int(text))
    if match := _SLASH.fullmatch(text):
        sign, numerator, denominator = "", *match.groups()
    elif match := _FRAC.fullmatch(text):
        sign, numerator, denominator = match.groups()
    else:
        return None
    if int(denominator) == 0:
        return None
    value = Fraction(int(numerator), int(denominator))
    return -value if sign else value


def decide(golds: Sequence[str], answer: str) -> bool | None:
    """Whether ``answer`` equals one of the golds; None where this file cannot tell.

    The decision never differs from that of ``reader.judge``, which is slower; a test compares the two.
    """
    if answer in golds:
        return True
    value = rational(answer)
    if value is None:
        return None
    gold_values = [rational(gold) for gold in golds]
    if value in gold_values:
        return True
    return None if None in gold_values else False
