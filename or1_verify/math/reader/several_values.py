r"""Expands an answer that stands for several values into those values: ``\pm``, ``x = 1, 2``, ``(x, y) = (3, 4)``."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

from or1_verify.math.reader.answer_types import Reading, Relation, Several
from or1_verify.math.reader.expression_tree import Node, operations
from or1_verify.math.reader.quantity import Quantity

_MAX_SIGNS = 4
_VARIABLE = re.compile(r"[A-Za-z]|\\[a-z]+ ")


def spread(reading: Reading) -> Reading:
    r"""Return ``\pm 1`` as the list 1, -1, and ``x = 1, 2`` or ``(x, y) = (1, 2)`` as a list of equations."""
    if isinstance(reading, Quantity) and {"pm", "mp"} & operations(reading.tree):
        return Several(_branches(reading))
    if isinstance(reading, Relation) and (pairs := pointwise(reading) or _chained(reading)):
        return pairs
    if isinstance(reading, Relation) and reading.operators in (("=",), ("in",)):
        inner = spread(reading.sides[1])
        if (
            isinstance(inner, Several)
            and inner.brackets in ("", "{}")
            and (inner.brackets == "" or reading.operators == ("in",))
        ):
            items = tuple(Relation(("=",), (reading.sides[0], item), (reading.heads[0], "")) for item in inner.items)
            return Several(items)
    if isinstance(reading, Several) and reading.brackets == "()" and (points := _signed_points(reading)):
        return points
    if isinstance(reading, Several) and reading.brackets in ("", "{}"):
        return Several(_flattened(reading), reading.brackets, reading.joined_by)
    return reading


def _branches(quantity: Quantity) -> tuple[Quantity, ...]:
    r"""Return the two values of a quantity with ``\pm``. All its signs change together."""
    return tuple(replace(quantity, tree=_branch(quantity.tree, upper)) for upper in (True, False))


def _branch(tree: Node, upper: bool) -> Node:
    arguments = tuple(_branch(argument, upper) for argument in tree.args)
    if tree.op in ("pm", "mp"):
        return arguments[0] if (tree.op == "pm") == upper else Node("neg", arguments)
    return Node(tree.op, arguments, tree.number, tree.name)


def same_links(gold: Reading, answer: Reading) -> bool:
    r"""Return whether both sides pair the signs (``x = \pm 1, y = \mp 2``) and name points (``(x, y) = ...``) alike."""
    signs = _signs(gold), _signs(answer)
    if all(signs) and signs[0].keys() == signs[1].keys():
        swapped = {name: {"pm": "mp", "mp": "pm"}.get(sign, sign) for name, sign in signs[1].items()}
        if signs[0] not in (signs[1], swapped):
            return False
    names = _point_names(gold), _point_names(answer)
    return not all(names) or names[0] == names[1]


def _signs(reading: Reading) -> dict[str, str]:
    """Return the sign ("pm", "mp" or "") of each name's value in a list of equations; {} if no value has a sign."""
    items = reading.items if isinstance(reading, Several) and reading.brackets == "" else ()
    sign_of: dict[str, str] = {}
    for item in items:
        if not (isinstance(item, Relation) and item.operators == ("=",) and item.heads[0]):
            return {}
        value = item.sides[1]
        signs = {"pm", "mp"} & operations(value.tree) if isinstance(value, Quantity) else set()
        sign_of[item.heads[0]] = min(signs, default="")
    return sign_of if len(sign_of) > 1 and any(sign_of.values()) else {}


def _point_names(reading: Reading) -> tuple[str, ...]:
    """Return the names of points' coordinates: (x, y) for ``(x, y) = (1, 2), (3, 4)``; () for other readings."""
    first = reading.items[0] if isinstance(reading, Several) and len(reading.items) > 1 else None
    points = pointwise(first) if isinstance(first, Relation) else None
    return tuple(item.heads[0] for item in points.items if isinstance(item, Relation)) if points else ()


def _signed_points(point: Several) -> Several | None:
    r"""Return the 4 points of ``(\pm a, \pm b)`` or the 2 of ``(\pm a, \mp b)``; None for 0 signs or more than 4."""
    signs = [operations(item.tree) & {"pm", "mp"} if isinstance(item, Quantity) else set() for item in point.items]
    if not any(signs) or sum(map(bool, signs)) > _MAX_SIGNS:
        return None
    ways = [list(_branches(item)) if isinstance(item, Quantity) else [] for item in point.items]
    if {"mp"} in signs:
        chosen = [tuple(way[upper] for way in ways) for upper in (0, 1) if all(ways)]
    else:
        chosen = list(product(*(way if sign else way[:1] for way, sign in zip(ways, signs, strict=True))))
    points = tuple(Several(tuple(quantities), "()") for quantities in chosen)
    return Several(points) if points else None


def pointwise(relation: Relation) -> Several | None:
    """Return ``(x, y) = (3, 4)`` as ``x = 3, y = 4``; None for any other relation."""
    if relation.operators != ("=",):
        return None
    left, right = relation.sides
    if not (isinstance(left, Several) and isinstance(right, Several) and left.brackets == right.brackets == "()"):
        return None
    names = [item.tree.name for item in left.items if isinstance(item, Quantity) and item.tree.op == "sym"]
    if len(names) != len(left.items) or len(names) != len(right.items):
        return None
    sides = zip(left.items, right.items, names, strict=True)
    return Several(tuple(Relation(("=",), (a, b), (name, "")) for a, b, name in sides))


def _chained(relation: Relation) -> Several | None:
    """Return ``x = y = 2`` as ``x = 2, y = 2``; None for any other relation."""
    named = list(zip(relation.heads, relation.sides, strict=True))
    if relation.heads[-1]:  # x = y = z, in any order
        named.sort(key=lambda side: side[0], reverse=True)
    heads = [head for head, _ in named[:-1]]
    if (
        set(relation.operators) != {"="}
        or not 1 < len(heads) == len({*heads})
        or not all(map(_VARIABLE.fullmatch, heads))
    ):
        return None
    return Several(tuple(Relation(("=",), (side, named[-1][1]), (head, "")) for head, side in named[:-1]))


def _unnamed(item: Reading) -> Reading:
    """Return a point without its names: (2, 3) for ``(p, q) = (2, 3)``. Return any other item as it is."""
    if isinstance(item, Relation) and item.operators == ("=",) and isinstance(item.sides[0], Several):
        return item.sides[1] if pointwise(item) else item
    return item


def _flattened(group: Several) -> tuple[Reading, ...]:
    flat: list[Reading] = []
    last: Relation | None = None
    for item in map(spread, map(_unnamed, group.items) if len(group.items) > 1 else group.items):
        parts = item.items if isinstance(item, Several) and item.brackets == "" else (item,)
        for part in parts:
            if isinstance(part, Relation) and part.operators in (("=",), ("!=",)) and part.heads[0]:
                last = part
            elif last is not None and isinstance(part, Quantity) and len(flat) > 0:
                part = Relation(last.operators, (last.sides[0], part), (last.heads[0], ""))
            flat.append(part)
    return tuple(flat)
