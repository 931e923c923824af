r"""Compares families of values over the integers: ``x = \pi/4 + k\pi``, ``x = 2k\pi \pm \pi/3``, ``n = 3m - 2``.

Two families are the same if they have the same members around 0. How many formulas a family has, and which member
k = 0 gives, does not count: ``x = \pi/6 + 2k\pi`` or ``x = 5\pi/6 + 2k\pi`` is ``x = (-1)^k \pi/6 + k\pi``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import mpmath

from or1_verify.math.reader.answer_types import Reading, Relation, Several
from or1_verify.math.reader.compare_quantities import is_worked_out
from or1_verify.math.reader.expression_tree import Node, symbols
from or1_verify.math.reader.numeric_value import TooLarge, Undefined, evaluate
from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.several_values import spread

_UNKNOWN = re.compile(r"[a-xz]|\\[a-z]+ ")
"""Names that an unknown may have. y is excluded, because ``y = 2n + 1`` is a function of n."""

_LOOKED_AT = 60
"""The parameter runs from -60 to 60. Values are compared up to the distance from 0 that every formula reaches."""
_FEWEST = 6
_DIGITS = 40


@dataclass(frozen=True, slots=True)
class _Family:
    unknown: str
    """Name of the unknown; "" if no formula names it."""
    formulas: tuple[Node, ...]


def same_family(gold: Reading, answer: Reading, parameter: str) -> bool:
    """Return whether two readings give one unknown the same values, when ``parameter`` runs over the integers."""
    with mpmath.workdps(_DIGITS + 20):
        ours, theirs = _family(gold, parameter), _family(answer, parameter)
        if ours is None or theirs is None or theirs.unknown not in ("", ours.unknown):
            return False
        if not _UNKNOWN.fullmatch(ours.unknown) or ours.unknown == parameter:
            return False
        if not all(any(is_worked_out(one, other) for one in ours.formulas) for other in theirs.formulas):
            return False
        members = [[_members(tree, parameter) for tree in family.formulas] for family in (ours, theirs)]
        reach = min((min(abs(each[0]), abs(each[-1])) for side in members for each in side if each), default=0)
        near = [[{value for value in each if abs(value) < reach} for each in side] for side in members]
        return min(map(len, near[0] + near[1])) >= _FEWEST and set().union(*near[0]) == set().union(*near[1])


def _family(value: Reading, parameter: str) -> _Family | None:
    """Return the family that a reading's formulas in ``parameter`` give for one unknown; None for any other reading."""
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
        if isinstance(part, Relation) and not part.heads[0]:  # x^2 = k
            return None
        heads.add(part.heads[0] if isinstance(part, Relation) else "")
        formulas.append(formula.tree)
    return _Family(heads.pop(), tuple(formulas)) if len(heads) == 1 else None


def _members(tree: Node, parameter: str) -> list[int]:
    """Return the values of a formula, in the order of its parameter and in units of the last compared digit.

    The list is empty if a value is not real, or if the values at even parameters (or at odd ones) have no fixed step.
    """
    try:
        values = [evaluate(tree, {parameter: mpmath.mpf(k)}) for k in range(-_LOOKED_AT, _LOOKED_AT + 1)]
    except (TooLarge, Undefined):
        return []
    units = [mpmath.nint(value * mpmath.mpf(10) ** _DIGITS) for value in values]
    members = [int(mpmath.re(unit)) for unit in units]
    steps = [after - before for before, after in zip(members, members[2:], strict=False)]
    return [] if any(map(mpmath.im, units)) or max(steps) - min(steps) > 2 else members  # each is rounded
