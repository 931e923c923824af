r"""Compares families over the integers: ``x = \pi/4 + k\pi``, ``x = 2k\pi \pm \pi/3``, ``n = 3m - 2``.

For even k, and for odd k, each formula must be an arithmetic progression. Two families are the same when their
progressions have the same members, wherever k starts and however many formulas there are:
``x = \pi/6 + 2k\pi`` or ``x = 5\pi/6 + 2k\pi`` is ``x = (-1)^k \pi/6 + k\pi``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import mpmath

from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.records import Reading, Relation, Several
from or1_verify.math.reader.scalars import is_worked_out
from or1_verify.math.reader.spread import spread
from or1_verify.math.reader.tree import Node, symbols
from or1_verify.math.reader.value import TooLarge, Undefined, evaluate

_UNKNOWN = re.compile(r"[a-xz]|\\[a-z]+ ")
"""Not y: ``y = 2n + 1`` is a function of n."""

_LOOKED_AT = range(-4, 5)
_MAX_DENOMINATOR = 24
_MAX_RESIDUES = 144
_DIGITS = 40

Progression = tuple[mpmath.mpf, mpmath.mpf]
"""(a member, the step)."""


@dataclass(frozen=True, slots=True)
class _Family:
    unknown: str
    """Its name, or ""."""
    formulas: tuple[Node, ...]
    progressions: tuple[Progression, ...]


def same_family(gold: Reading, answer: Reading, parameter: str) -> bool:
    """Whether two readings, in which ``parameter`` is any integer, are families of one unknown with equal members."""
    with mpmath.workdps(_DIGITS + 20):
        ours, theirs = _family(gold, parameter), _family(answer, parameter)
        if ours is None or theirs is None or theirs.unknown not in ("", ours.unknown):
            return False
        if not _UNKNOWN.fullmatch(ours.unknown) or ours.unknown == parameter:
            return False
        if not all(any(is_worked_out(one, other) for one in ours.formulas) for other in theirs.formulas):
            return False
        period = _period([step for _, step in (*ours.progressions, *theirs.progressions)])
        return period is not None and _residues(ours, period) == _residues(theirs, period)


def _family(value: Reading, parameter: str) -> _Family | None:
    """Return one unknown's formulas as progressions; None where one of them is none."""
    spreaded = spread(value)
    parts = spreaded.items if isinstance(spreaded, Several) and spreaded.brackets == "" else (spreaded,)
    heads: set[str] = set()
    formulas: list[Node] = []
    for part in parts:
        formula = part.sides[1] if isinstance(part, Relation) and part.operators == ("=",) else part
        if not isinstance(formula, Quantity) or symbols(formula.tree) != {parameter}:
            return None
        if formula != Quantity(formula.tree):  # it has a unit, a percent sign, a noun
            return None
        heads.add(part.heads[0] if isinstance(part, Relation) else "")
        formulas.append(formula.tree)
    progressions = [_progression(tree, parameter, start) for tree in formulas for start in (0, 1)]
    known = tuple(progression for progression in progressions if progression is not None)
    return _Family(heads.pop(), tuple(formulas), known) if len(heads) == 1 and len(known) == len(progressions) else None


def _progression(tree: Node, parameter: str, start: int) -> Progression | None:
    """Return the values at ``start`` plus even numbers; None where they have no common step, or where it is 0."""
    try:
        values = [evaluate(tree, {parameter: mpmath.mpf(start + 2 * k)}) for k in _LOOKED_AT]
    except (TooLarge, Undefined):
        return None
    if any(abs(mpmath.im(value)) > mpmath.mpf(10) ** -_DIGITS for value in values):
        return None
    reals = [mpmath.re(value) for value in values]
    steps = [after - before for before, after in pairwise(reals)]
    if any(abs(step - steps[0]) > mpmath.mpf(10) ** -_DIGITS for step in steps) or abs(steps[0]) < 1e-30:
        return None
    return reals[0], abs(steps[0])


def _period(steps: Sequence[mpmath.mpf]) -> mpmath.mpf | None:
    """Return the least common multiple of the steps; None where their ratios are not those of small integers."""
    ratios = []
    for step in steps:
        ratio = Fraction(str(step / steps[0])).limit_denominator(_MAX_DENOMINATOR)
        if abs(step / steps[0] - mpmath.mpf(ratio.numerator) / ratio.denominator) > mpmath.mpf(10) ** -_DIGITS:
            return None
        ratios.append(ratio)
    common = Fraction(math.lcm(*(r.numerator for r in ratios)), math.gcd(*(r.denominator for r in ratios)))
    if any(common / ratio > _MAX_RESIDUES for ratio in ratios):
        return None
    return steps[0] * common.numerator / common.denominator


def _residues(family: _Family, period: mpmath.mpf) -> set[int]:
    """Return the members within one period, as shares of it in units of the last digit that counts."""
    unit = 10 ** (_DIGITS - 1)
    residues = set()
    for start, step in family.progressions:
        for k in range(int(mpmath.nint(period / step))):
            share = (start + k * step) / period
            residues.add(int(mpmath.nint((share - mpmath.floor(share)) * unit)) % unit)
    return residues
