"""Whether two readings say the same: one rule for each pair of types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from or1_megatron.verify.math.reader import notation
from or1_megatron.verify.math.reader.quantity import Quantity
from or1_megatron.verify.math.reader.ranges import covered, names_of, same_ranges
from or1_megatron.verify.math.reader.reading import (
    Cases,
    Dots,
    Empty,
    Group,
    Matrix,
    Modular,
    NumberSet,
    Ratio,
    Reading,
    Relation,
    Words,
)
from or1_megatron.verify.math.reader.scalars import is_numeral, is_plain, same_quantity
from or1_megatron.verify.math.reader.spread import spread
from or1_megatron.verify.math.reader.tree import Node
from or1_megatron.verify.math.reader.value import proportional, real, same, symbols

_T = TypeVar("_T")
_MAX_ITEMS = 64


def compare(gold: Reading, answer: Reading) -> bool:
    """Whether two readings say the same under the policy. Raises Unreadable for what cannot be compared."""
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _same_words(gold, answer)
    if isinstance(gold, Empty) or isinstance(answer, Empty):
        return isinstance(gold, Empty) and isinstance(answer, Empty)
    if isinstance(gold, Dots) or isinstance(answer, Dots):
        return isinstance(gold, Dots) and isinstance(answer, Dots)
    if isinstance(gold, Cases) or isinstance(answer, Cases):
        return _same_cases(gold, answer)
    if _is_range(gold) and _is_range(answer):
        return _same_range(gold, answer)
    gold, answer = spread(gold), spread(answer)
    if isinstance(gold, Modular) or isinstance(answer, Modular):
        return _same_modular(gold, answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer)
    if isinstance(gold, Ratio) or isinstance(answer, Ratio):
        return _same_ratio(gold, answer)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return same_quantity(gold, answer)
    if isinstance(gold, NumberSet) and isinstance(answer, NumberSet):
        return gold == answer
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_group(gold, answer)
    return False


def _same_words(gold: Reading, answer: Reading) -> bool:
    if not (isinstance(gold, Words) and isinstance(answer, Words)):
        return False
    return _word_key(gold.text) == _word_key(answer.text)


def _word_key(text: str) -> tuple[str, ...]:
    parts = re.split(r",|\band\b", text)
    return tuple(
        sorted(" ".join(_stem(word) for word in part.split() if word not in ("a", "an", "the")) for part in parts)
    )


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def _is_range(reading: Reading) -> bool:
    """Whether it says a set of reals otherwise than by one bracketed pair, which may be a point as well."""
    return covered(reading) is not None


def _same_range(gold: Reading, answer: Reading) -> bool:
    if isinstance(gold, Group) and isinstance(answer, Group):  # two pairs: points or intervals, the same rule for both
        return _same_group(gold, answer)
    names = names_of(gold), names_of(answer)
    if names[0] and names[1] and names[0] != names[1]:
        return False
    left, right = covered(gold), covered(answer)
    return left is not None and right is not None and same_ranges(left, right)


def _same_modular(gold: Reading, answer: Reading) -> bool:
    if isinstance(gold, Modular) and isinstance(answer, Modular):
        return same(gold.modulus, answer.modulus) and compare(_residue(gold.value), _residue(answer.value))
    if isinstance(gold, Modular):
        return compare(_residue(gold.value), answer)
    assert isinstance(answer, Modular)
    return compare(gold, _residue(answer.value))


def _residue(value: Reading) -> Reading:
    return value.sides[1] if isinstance(value, Relation) and value.operators == ("==",) else value


def _same_relation(gold: Reading, answer: Reading) -> bool:
    if isinstance(gold, Group) or isinstance(answer, Group):
        return _same_group(gold, answer)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relations(gold, answer)
    if isinstance(gold, Relation):
        return any(compare(value, answer) for value in _values(gold, as_gold=True))
    assert isinstance(answer, Relation)
    return any(compare(gold, value) for value in _values_for(gold, answer))


def _same_relations(gold: Relation, answer: Relation) -> bool:
    if _inequality(gold) and _inequality(answer):
        return _same_order(gold, answer)
    assigned = _assigned(gold), _assigned(answer)
    if assigned[0] is not None and assigned[1] is not None and notation.same_head(assigned[0][0], assigned[1][0]):
        return compare(assigned[0][1], assigned[1][1])
    if assigned[0] is not None and isinstance(assigned[0][1], Quantity) and is_plain(assigned[0][1].tree):
        return False  # x = 5 is not answered by 7x = 35
    return _same_curve(gold, answer)


def _same_curve(gold: Relation, answer: Relation) -> bool:
    sides = (*gold.sides, *answer.sides)
    if gold.operators != ("=",) or answer.operators != ("=",):
        return (
            gold.operators == answer.operators
            and len(gold.sides) == len(answer.sides)
            and all(compare(ours, theirs) for ours, theirs in zip(gold.sides, answer.sides, strict=True))
        )
    if not all(isinstance(side, Quantity) for side in sides):
        return all(compare(ours, theirs) for ours, theirs in zip(gold.sides, answer.sides, strict=True))
    left, right = _difference(gold), _difference(answer)
    return symbols(left) == symbols(right) and proportional(left, right)


def _difference(relation: Relation) -> Node:
    first, second = relation.sides[0], relation.sides[-1]
    assert isinstance(first, Quantity) and isinstance(second, Quantity)
    return Node("add", (first.tree, Node("neg", (second.tree,))))


def _inequality(relation: Relation) -> bool:
    return set(relation.operators) <= {"<", "<=", ">", ">="}


def _same_order(gold: Relation, answer: Relation) -> bool:
    left, right = _ascending(gold), _ascending(answer)
    if left is None or right is None:
        return False
    if left[0] == right[0] and all(compare(a, b) for a, b in zip(left[1], right[1], strict=True)):
        return True
    if len(left[0]) != 1 or left[0] != right[0] or not all(isinstance(side, Quantity) for side in left[1] + right[1]):
        return False
    ordered = [Relation(("=",), tuple(sides), ("", "")) for sides in (left[1], right[1])]
    return proportional(_difference(ordered[0]), _difference(ordered[1]), positive=True)


def _ascending(relation: Relation) -> tuple[list[str], list[Reading]] | None:
    if set(relation.operators) <= {"<", "<="}:
        return list(relation.operators), list(relation.sides)
    if set(relation.operators) <= {">", ">="}:
        return [operator.replace(">", "<") for operator in reversed(relation.operators)], list(reversed(relation.sides))
    return None


def _assigned(relation: Relation) -> tuple[str, Reading] | None:
    """(name, value) of ``x = 5``, ``5 = x``, ``x \\in A`` and ``S = 2 + 3 = 5``."""
    if relation.operators[0] == "in" and len(relation.operators) == 1 and relation.heads[0]:
        return relation.heads[0], relation.sides[1]
    if set(relation.operators) != {"="}:
        return None
    if len(relation.sides) == 2 and _is_measure(relation.sides[0]):
        return "", relation.sides[1]
    if relation.heads[0] and not _consistent(relation.sides[1:]):
        return None
    if relation.heads[0] and not relation.heads[-1]:
        return relation.heads[0], relation.sides[-1]
    if relation.heads[-1] and not relation.heads[0] and len(relation.sides) == 2:
        return relation.heads[-1], relation.sides[0]
    return (relation.heads[0], relation.sides[-1]) if relation.heads[0] else None


def _is_measure(side: Reading) -> bool:
    """``|AB|`` or ``S_1 : S_2``: the name of a length or of a ratio."""
    if isinstance(side, Ratio):
        return all(part.op == "sym" or set(symbols(part)) for part in side.parts)
    if not (isinstance(side, Quantity) and side.tree.op == "abs"):
        return False
    return all(name[:1].isupper() for name in symbols(side.tree)) and bool(symbols(side.tree))


def _consistent(sides: tuple[Reading, ...]) -> bool:
    return all(compare(sides[-1], side) or _equal_trees(sides[-1], side) for side in sides[:-1])


def _equal_trees(left: Reading, right: Reading) -> bool:
    return isinstance(left, Quantity) and isinstance(right, Quantity) and same(left.tree, right.tree)


def _values(relation: Relation, as_gold: bool) -> list[Reading]:
    """The values that a relation states: of ``x = 5`` the 5; of ``a \\approx b`` a, and for a gold b as well."""
    if relation.operators[-1] == "~":
        exact = relation.sides[:-1]
        if relation.heads[0] and len(exact) == 1:
            last = relation.sides[-1]
            return [last.approximate() if isinstance(last, Quantity) else last]
        rest = Relation(relation.operators[:-1], exact, relation.heads[:-1]) if len(exact) > 1 else None
        values = _values(rest, as_gold) if rest else [exact[0]]
        if not as_gold and not _near(exact[-1], relation.sides[-1]):
            return []
        return [*values, relation.sides[-1]] if as_gold else values
    assigned = _assigned(relation)
    return [] if assigned is None else [assigned[1]]


def _near(exact: Reading, rounded: Reading) -> bool:
    if not (isinstance(exact, Quantity) and isinstance(rounded, Quantity)):
        return False
    value, shown = real(exact.tree), real(rounded.tree)
    return value is not None and shown is not None and bool(abs(value - shown) <= abs(value) / 20)


def _values_for(gold: Reading, answer: Relation) -> list[Reading]:
    values = _values(answer, as_gold=False)
    last = answer.sides[-1]
    if not values and set(answer.operators) == {"="} and isinstance(last, Quantity) and isinstance(gold, Quantity):
        first = answer.sides[0]
        numbers = isinstance(first, Quantity) and is_plain(gold.tree) and is_numeral(last.tree)
        named = isinstance(first, Quantity) and symbols(first.tree) and len(answer.sides) == 2
        if numbers and (named or _consistent(answer.sides)):
            return [last]  # a + b = 7, or 3 + 4 = 7, states a number
    return values


def _same_matrix(gold: Reading, answer: Reading) -> bool:
    rows = [_rows(side) for side in (gold, answer)]
    if rows[0] is None or rows[1] is None or [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    pairs = zip(sum(rows[0], ()), sum(rows[1], ()), strict=True)
    return all(same_quantity(Quantity(ours), Quantity(theirs)) for ours, theirs in pairs)


def _rows(side: Reading) -> tuple[tuple[Node, ...], ...] | None:
    if isinstance(side, Matrix):
        return side.rows
    if isinstance(side, Group) and side.brackets == "()" and all(isinstance(item, Quantity) for item in side.items):
        return tuple((item.tree,) for item in side.items if isinstance(item, Quantity))  # a column written in a row
    if isinstance(side, Relation) and (assigned := _assigned(side)):
        return _rows(assigned[1])
    return None


def _same_ratio(gold: Reading, answer: Reading) -> bool:
    parts = [_ratio_parts(side) for side in (gold, answer)]
    if parts[0] is None or parts[1] is None or len(parts[0]) != len(parts[1]) or len(parts[0]) < 2:
        return False
    ours, theirs = parts
    assert ours is not None and theirs is not None
    if any(part.op == "ldots" for part in ours + theirs):
        return all(a == b or same(a, b) for a, b in zip(ours, theirs, strict=True))
    crosses = ((Node("mul", (a, theirs[0])), Node("mul", (b, ours[0]))) for a, b in zip(ours, theirs, strict=True))
    return all(same(left, right) for left, right in crosses)


def _ratio_parts(side: Reading) -> tuple[Node, ...] | None:
    if isinstance(side, Ratio):
        return side.parts
    if isinstance(side, Quantity) and side.unit is None:
        return (side.tree, Node("num", number=notation.ONE, name="1"))
    if isinstance(side, Relation) and (assigned := _assigned(side)):
        return _ratio_parts(assigned[1])
    return None


def _same_cases(gold: Reading, answer: Reading) -> bool:
    sides = [side.sides[1] if isinstance(side, Relation) and len(side.sides) == 2 else side for side in (gold, answer)]
    ours, theirs = sides
    if not (isinstance(ours, Cases) and isinstance(theirs, Cases)) or len(ours.rows) != len(theirs.rows):
        return False
    return _matched(list(ours.rows), list(theirs.rows), lambda a, b: compare(a[0], b[0]) and compare(a[1], b[1]))


def _same_group(gold: Reading, answer: Reading) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Group):
        return any(compare(value, answer) for value in _values(gold, as_gold=True) if not isinstance(value, Relation))
    if isinstance(answer, Relation) and isinstance(gold, Group):
        return any(compare(gold, value) for value in _values(answer, as_gold=False) if not isinstance(value, Relation))
    if not (isinstance(gold, Group) and isinstance(answer, Group)):
        return _same_singleton(gold, answer)
    if max(len(gold.items), len(answer.items)) > _MAX_ITEMS:
        return False
    if len(answer.items) > len(gold.items) > 1 and answer.brackets in ("", "{}"):
        answer = Group(_distinct(answer.items), answer.brackets, answer.joined_by)
    if len(gold.items) != len(answer.items):
        return False
    bare = (gold.brackets == "", answer.brackets == "")
    named = notation.assignments(gold), notation.assignments(answer)
    if (named[0] or named[1]) and _same_assignments(gold, answer, named):
        return True
    if any(_name_variables(names) for names in named):
        return False
    if all(bare) and not any(isinstance(item, Dots) for item in gold.items):
        return _matched(list(gold.items), list(answer.items), _same_item)
    ordered = all(compare(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    if gold.brackets == answer.brackets or "{}" in (gold.brackets, answer.brackets):
        loose = {gold.brackets, answer.brackets} <= {"", "{}"}
        return (
            _matched(list(gold.items), list(answer.items), _same_item)
            if loose and not all(bare)
            else (ordered and gold.brackets == answer.brackets)
        )
    return any(bare) and {gold.brackets, answer.brackets} <= {"", "()"} and ordered


def _name_variables(names: dict[str, Reading] | None) -> bool:
    """Whether each value has a variable of its own, and not only a number, as the roots x_1 and x_2 have."""
    return bool(names) and len({name.partition("_")[0] for name in names or ()}) == len(names or ()) > 1


def _same_item(gold: Reading, answer: Reading) -> bool:
    return compare(gold, answer)


def _same_singleton(gold: Reading, answer: Reading) -> bool:
    for group, other, swapped in ((gold, answer, False), (answer, gold, True)):
        if isinstance(group, Group) and group.brackets in ("", "{}") and len(group.items) == 1:
            return compare(other, group.items[0]) if swapped else compare(group.items[0], other)
    return False


def _same_assignments(gold: Group, answer: Group, named: tuple[dict[str, Reading] | None, ...]) -> bool:
    ours, theirs = named
    if ours and theirs:
        return ours.keys() == theirs.keys() and all(compare(ours[name], theirs[name]) for name in ours)
    if answer.brackets == "{}" or gold.brackets == "{}":
        return False
    left = list(ours.values()) if ours else list(gold.items)
    # Against a tuple an answer's values stand in the order of their names, not in the order it chose to list them.
    right = _by_name(theirs) if theirs else list(answer.items)
    return all(compare(a, b) for a, b in zip(left, right, strict=True))


def _distinct(items: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Without what is said twice."""
    kept: list[Reading] = []
    for item in items:
        if not any(compare(other, item) for other in kept):
            kept.append(item)
    return tuple(kept)


def _by_name(named: dict[str, Reading]) -> list[Reading]:
    return [value for _, value in sorted(named.items())]


def _matched(ours: list[_T], theirs: list[_T], equal: Callable[[_T, _T], bool]) -> bool:
    """Whether the two hold the same items, each as often. Equality is transitive enough for a greedy match."""
    if len(ours) != len(theirs):
        return False
    rest = list(theirs)
    for item in ours:
        index = next((index for index, other in enumerate(rest) if equal(item, other)), None)
        if index is None:
            return False
        del rest[index]
    return True
