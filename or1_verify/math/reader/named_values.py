r"""Decides when two names mean the same (``\angle A`` and ``A``), and maps names to values in ``x = 1, y = 2``."""

from __future__ import annotations

import re

from or1_verify.math.reader.answer_types import Reading, Relation, Several
from or1_verify.math.reader.quantity import Quantity

_CALL = re.compile(r"([A-Za-z]\w*(?:\^-1)?)('*)\(([a-z](?:,[a-z])*)\)")


def same_name(gold: str, answer: str) -> bool:
    """Return whether two names are the same, as ``\\angle A`` and ``A``, ``f(x)`` and ``f``, ``f(x)`` and ``y``."""
    names = _bare(gold), _bare(answer)
    for name, other in (names, names[::-1]):
        if (call := _CALL.fullmatch(name)) and not _CALL.fullmatch(other):
            return other == call[1] + call[2] or (other == "y" + call[2] and "y" not in call[3])
    return names[0] == names[1]


def _bare(text: str) -> str:
    return re.sub(r"[{}\s]|\\angle", "", text)


def assignments(group: Several) -> dict[str, Reading] | None:
    """Return values by name. None unless all items are ``name = value`` or ``name \\approx value``, each name once."""
    named: dict[str, Reading] = {}
    for item in group.items:
        if not (isinstance(item, Relation) and item.operators in (("=",), ("~",)) and item.heads[0]):
            return None
        value = item.sides[1]
        if item.operators == ("~",) and isinstance(value, Quantity):
            value = value.approximate()
        named[_bare(item.heads[0])] = value
    return named if len(named) == len(group.items) else None
