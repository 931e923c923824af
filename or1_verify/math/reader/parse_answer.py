r"""Decides an answer's type and parses it: a quantity, a list, a tuple, an interval, a relation, a matrix, words, ...

The type follows from structure alone, outermost first: unions, commas and joining words, relations, a bracket around
everything, a quantity. A text without such structure is read as words if it has any; otherwise it is unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from or1_verify.math.reader.answer_types import (
    Cases,
    Conditional,
    Dots,
    Empty,
    Matrix,
    Modular,
    NumberSet,
    Ratio,
    Reading,
    Relation,
    Restated,
    SetBuilder,
    Several,
    Union,
    Words,
)
from or1_verify.math.reader.brackets import depths, spelling, split
from or1_verify.math.reader.compare_conditions import with_conditions
from or1_verify.math.reader.expression_equality import same
from or1_verify.math.reader.expression_tree import Node, number_node, symbols
from or1_verify.math.reader.normalization import Token, Unreadable, plain, tokens
from or1_verify.math.reader.parse_expression import parse
from or1_verify.math.reader.quantity import Quantity, read_compound, read_quantity, without_lead_in
from or1_verify.math.reader.split_conditions import ORDERS, split_off
from or1_verify.math.reader.words import JOINERS, KNOWN_WORDS, NAMING, WORDS, change_nothing

_RELATIONS = {"le": "<=", "ge": ">=", "ne": "!=", "in": "in", "approx": "~", "equiv": "=="} | {op: op for op in "=<>"}
_SET_HEAD = re.compile(r"([A-Za-z]|\\[a-z]+ )(?:\\in \\mathbb \{?([RZNQ])\}?)?")
_LABELS = {word: word for word in WORDS["labels"].split()} | {"min": "minimum", "max": "maximum", "centre": "center"}
_HEAD = re.compile(
    r"(?:\\angle |\\triangle )?(?:[A-Za-z]|\\(?:vec|overline) \{[A-Za-z]+\}|\\[A-Za-z]+ ?|[A-Z]{2,3})"
    r"'*(?:_(?:\w|\{[^{}]*\}))?'*(?:\^\{-1\})?(?:\([^()]*\))?"
)
_NAMED = re.compile(
    r"\\(?:lim|det|max|min|sup|inf|gcd|lcm|int|operatorname)(?![A-Za-z])|\\begin \{?vmatrix"
    r"|[A-Za-z]'*\([^=]*\([^=]*\)\)$"
    r"|[A-Za-z]'*\([^()=]*(?:,|\\c[ua]p )[^()=]*\)$|(?i:lcm|gcd|hcf|gcf|rank|var|tr|dim)(?:\(.*\))?$"
    r"|\\\|.*\\\|$|\|\\vec .*\|$|\\mathbb \{E\}"
)
"""Left sides of equations that only name what is asked for: a limit, a determinant, ``f(f(3))``, ``d(A, B)``, LCM."""
_CONSTANTS = ("\\infty ", "\\pi ")
_POINT = re.compile(r"[A-Z](?:_(?:\w|\{\w+\}))?'*")
_NAMES = frozenset({"lcm", "gcd", "hcf", "gcf", "rank", "var", "tr", "dim", "vmatrix"})
_CALL = re.compile(r"[A-Za-z]\([a-z](?:,[a-z])+\)")
_MATRICES = frozenset({"pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"})
_NO_SOLUTION = re.compile(r"(?:there (?:is|are) )?no (?:real )?solutions?(?: ?:? ?\\emptyset)?")
_UNBOUNDED = re.compile(r"infinitely many(?: solutions)?|infinite")
_NUMBERS = {"integers": "Z", "rational numbers": "Q", "rationals": "Q", "real numbers": "R", "reals": "R"}
_SENTENCE = re.compile(r"(?:an?|the|(?:it|[a-z](?: ?\([a-z]\))?) (?:is|are))(?: an?)?(?: [a-z]{2,})+")
_SIGNED = re.compile(rf"(?:all |the |all the )?(positive|negative|non-?negative) ({'|'.join(_NUMBERS)})")
_EVERYTHING = frozenset({"all real numbers", "all reals", "all real number", "any real number", "the real numbers"})


def read(cleaned: str, rename: Callable[[list[Token]], list[Token]] | None = None) -> Reading:
    """Return the typed answer that a cleaned text holds. ``rename`` changes its tokens first. Raises Unreadable."""
    words = plain(cleaned)
    if (known := _set_in_words(words)) is not None:
        return known
    if _SENTENCE.fullmatch(words):
        return Words(words)
    try:
        items = tokens(cleaned)
        items, conditions = split_off(rename(items) if rename else items, _read)
        value = _read(items)
        return with_conditions(value, conditions) if conditions else value
    except Unreadable:
        if "\\" not in cleaned and re.search(r"[a-zA-Z]{2,}", cleaned):
            return Words(words)
        raise


def _set_in_words(words: str) -> Reading | None:
    if _NO_SOLUTION.fullmatch(words) or words in ("empty set", "the empty set"):
        return Empty()
    if match := _SIGNED.fullmatch(words):
        operator = {"positive": ">", "negative": "<"}.get(match[1], ">=")
        sides = (Quantity(Node("sym", name="x")), Quantity(number_node(0)))
        return SetBuilder("x", _NUMBERS[match[2]], Relation((operator,), sides, ("x", "")))
    if _UNBOUNDED.fullmatch(words):
        return Quantity(Node("infty"))
    return NumberSet("R") if words in _EVERYTHING else None


def _read(items: list[Token]) -> Reading:
    if not items:
        raise Unreadable("nothing")
    spoken = " ".join(token.text for token in items) if all(token.kind == "word" for token in items) else ""
    if known := _set_in_words(spoken):
        return known
    if len(items) == 1 and items[0].text == "ldots":
        return Dots()
    if special := read_compound(items) or _number_set(items) or _labelled(items) or _restated(items):
        return special
    for operator in ("cup", "cap", "setminus"):
        parts, separators = split(items, partial(_is, operator))
        if separators and (operator == "cup" or len(separators) == 1):
            sides = [_read(part) for part in parts]
            if all(map(_is_finite_set, sides)):
                return _of_sets(operator, [side.items for side in sides if isinstance(side, Several)])
            if operator == "cup":
                return Union(tuple(sides))
            if operator == "setminus" and isinstance(sides[0], NumberSet | SetBuilder):
                return _without(sides[0], sides[1])
    parts, separators = split(items, _separates)
    if {",", ";"} <= set(separators):  # p=5,q=2; p=7,q=2
        parts, _ = split(items, lambda token: token.kind == "sign" and token.text == ";")
        return Several(tuple(_as_tuple(_read(part)) for part in parts if part))
    if "or" in separators and _has_solutions(parts):  # x=1, y=2 or x=3, y=4
        parts, _ = split(items, lambda token: token.kind == "word" and token.text == "or")
        return Several(tuple(_as_tuple(_read(part)) for part in parts if part), joined_by="or")
    if separators:
        return _listed(parts, separators)
    if modular := _modular(items):
        return modular
    parts, separators = split(items, lambda token: token.kind != "word" and token.text in _RELATIONS)
    if separators:
        return _relation(parts, separators)
    parts, separators = split(items, lambda token: token.text == ":" or (token.kind == "word" and token.text == "to"))
    if separators == [":"] and (point := _point([*parts[0], *parts[1]])):
        return point
    if separators == [":"] and parts[0] and parts[1] and not without_lead_in(parts[0], keep=0):
        return _read(parts[1])  # "the answer is: 5"
    if separators:
        return _ratio(parts)
    items = without_lead_in(items)
    if known := _transposed(items) or _environment(items) or _point(items) or _bracketed(items):
        return known
    return read_quantity(items)


def _without(left: NumberSet | SetBuilder, right: Reading) -> SetBuilder:
    """Return ``left`` without the value, values or set ``right``, written as one more condition of ``left``."""
    name = left.variable if isinstance(left, SetBuilder) else "x"
    values = right.items if isinstance(right, Several) and right.brackets == "{}" else (right,)
    excluded = [left.condition] if isinstance(left, SetBuilder) else []
    conditions = *excluded, *(Relation(("!=",), (_symbol(name), value), ("", "")) for value in values)
    condition = Several(conditions, joined_by="and") if len(conditions) > 1 else conditions[0]
    return SetBuilder(name, left.domain if isinstance(left, SetBuilder) else left.name, condition)


def _is(operator: str, token: Token) -> bool:
    return token.text == operator


def _of_sets(operator: str, sets: list[tuple[Reading, ...]]) -> Reading:
    """Return the union ("cup") of finite sets, or the intersection ("cap") or difference of two finite sets."""
    if operator == "cup":
        elements: list[Reading] = []
        for item in chain.from_iterable(sets):
            elements += [] if _is_among(item, elements) else [item]
        return Several(tuple(elements), "{}")
    chosen = tuple(item for item in sets[0] if _is_among(item, sets[1]) == (operator == "cap"))
    return Several(chosen, "{}") if chosen else Empty()


def _is_finite_set(side: Reading) -> bool:
    if not (isinstance(side, Several) and side.brackets == "{}"):
        return False
    return all(isinstance(item, Quantity) and not symbols(item.tree) for item in side.items)


def _is_among(item: Reading, others: Sequence[Reading]) -> bool:
    return any(isinstance(item, Quantity) and isinstance(o, Quantity) and same(item.whole, o.whole) for o in others)


def _has_solutions(parts: list[list[Token]]) -> bool:
    """Return whether the parts are several solutions: equations for several names, with a name that recurs."""
    names = [spelling(split(part, lambda token: token.text == "=")[0][0]) for part in parts]
    given = all(any(token.text == "=" for token in part) for part in parts)
    return given and 1 < len(set(names)) < len(names)


def _as_tuple(reading: Reading) -> Reading:
    return Several(reading.items, "()") if isinstance(reading, Several) and reading.brackets == "" else reading


def _separates(token: Token) -> bool:
    return (token.kind == "sign" and token.text in ",;") or (token.kind == "word" and token.text in JOINERS)


def _listed(parts: list[list[Token]], separators: list[str]) -> Reading:
    joiner = next((text for text in separators if text in JOINERS), ",")
    if len(parts) > 1 and separators[0] == "," and parts[0] and not without_lead_in(parts[0], keep=0):
        return _listed(parts[1:], separators[1:]) if separators[1:] else _read(parts[1])  # "therefore, 5"
    filled = [part for part in parts if part]
    if len(filled) < 2 or not parts[0] or not parts[-1] or (joiner == "," and len(filled) != len(parts)):
        raise Unreadable("a list with an empty place")
    filled[0] = without_lead_in(filled[0])
    several = Several(tuple(_as_tuple(_read(part)) for part in filled), joined_by=joiner)
    return _conditional(several) or several


def _conditional(group: Several) -> Conditional | None:
    """Read a formula followed by inequalities of its variables, ``y = x^2, x > 0``; None for other groups."""
    value, *rest = group.items
    last = value.sides[-1] if isinstance(value, Relation) and value.operators == ("=",) else value
    if group.joined_by != "," or not isinstance(last, Quantity):
        return None
    conditions = [item.sides[1] if isinstance(item, Relation) and item.heads[0] == "domain" else item for item in rest]
    for item in conditions:
        if not isinstance(item, Relation) or not {head for head in item.heads if head} & symbols(last.tree):
            return None
        if not set(item.operators) <= {"<", "<=", ">", ">=", "!=", "in"}:
            return None
    return Conditional(value, tuple(conditions))


def _labelled(items: list[Token]) -> Relation | Several | None:
    """Read ``minimum: 1, maximum: 3`` as ``minimum = 1, maximum = 3``; None unless each part has a label of its own.

    The label of a single value must be one of ``_LABELS``.
    """
    parts = [part for part in split(items, _separates)[0] if part]
    values = []
    for part in parts:
        named = part[0].kind == "command" and part[0].text in ("min", "max") and part[1:2] and part[1].text in "=:"
        word = part[0].text if part[0].kind == "word" or named else ""
        label = _LABELS.get(word, word if len(parts) > 1 and len(word) > 2 and word not in KNOWN_WORDS else "")
        value = part[1:]
        while value and value[0].text in ("is", "has", "on", "at", ":", "="):
            value = value[1:]
        if not label or not value:
            return None
        values.append((label, _read(value)))
    if not values or len(dict(values)) < len(values):
        return None
    equations = tuple(_equation(label, value) for label, value in values)
    return Several(equations) if len(equations) > 1 else equations[0]


def _equation(name: str, value: Reading) -> Relation:
    return Relation(("=",), (_symbol(name), value), (name, ""))


def _symbol(name: str) -> Quantity:
    return Quantity(Node("sym", name=name))


def _restated(items: list[Token]) -> Restated | None:
    """Read an inequality, a colon and the same range as an interval: ``x < 2 : (-\\infty, 2)``; None otherwise."""
    parts, separators = split(items, lambda token: token.text == ":")
    if len(separators) != 1 or not all(parts) or parts[1][0].text not in ("(", "["):
        return None
    stated = any(token.kind != "word" and token.text in ORDERS for token in parts[0])
    return Restated(tuple(_read(part) for part in parts)) if stated else None


def _number_set(items: list[Token]) -> Reading | None:
    text = spelling(items)
    if text in ("\\emptyset ", "\\{\\}"):
        return Empty()
    if match := re.fullmatch(r"\\mathbb \{?([RZNQC])\}?((?:[\^_]\{?[+*]\}?)?)", text):
        return NumberSet(match[1] + re.sub(r"[{}^_]", "", match[2]))
    return None


def _modular(items: list[Token]) -> Reading | None:
    """Read a congruence; None for other tokens. ``n \\bmod 7`` alone is a value, which ``parse_expression`` reads."""
    if not any(token.text in ("equiv", "=", "pmod") for token in items):
        return None
    for index, (token, depth) in enumerate(zip(items, depths(items), strict=True)):
        if token.text in ("pmod", "bmod", "mod") and index > 0 and depth <= 1:
            before, after = items[:index], items[index + 1 :]
            if depth == 1 and before[-1].text == "(" and after and after[-1].text == ")":
                before, after = before[:-1], after[:-1]
            return Modular(_read(before), parse(after))
    return None


def _relation(parts: list[list[Token]], separators: list[str]) -> Reading:
    operators = tuple(_RELATIONS[text] for text in separators)
    if not parts[0] and operators == ("~",):
        reading = _read(parts[1])
        if isinstance(reading, Quantity):
            return reading.approximate()
        if isinstance(reading, Several) and all(isinstance(item, Quantity) for item in reading.items):
            items = tuple(item.approximate() for item in reading.items if isinstance(item, Quantity))
            return Several(items, reading.brackets, reading.joined_by)
    words = [token.text for token in parts[0] if token.kind == "word"]
    is_count = "of" in words and change_nothing(words, NAMING)  # "the number of ways"
    parts[0] = parts[0] if is_count else without_lead_in(parts[0], keep=0)
    if not all(parts):
        if len(parts) == 2 and operators == ("=",) and parts[1]:
            return _read(parts[1])  # "the answer is = 5"
        raise Unreadable("a relation with an empty side")
    spelled = [spelling(part) for part in parts]
    heads = tuple(text if _HEAD.fullmatch(text) and text not in _CONSTANTS else "" for text in spelled)
    if set(operators) == {"="} and (is_count or (_NAMED.match(spelled[0]) and change_nothing(words, _NAMES | NAMING))):
        named = Quantity(Node("sym", name=spelled[0]))
        return Relation(operators, (named, *map(_side, parts[1:], spelled[1:])), (spelled[0], *heads[1:]))
    return Relation(operators, tuple(map(_side, parts, spelled)), heads)


def _side(items: list[Token], spelled: str) -> Reading:
    """Read one side of a relation. A function of several variables, ``u(x,t)``, is read as a name."""
    return Quantity(Node("sym", name=spelled)) if _CALL.fullmatch(spelled) else _read(items)


def _ratio(parts: list[list[Token]]) -> Reading:
    parts[0] = without_lead_in(parts[0], keep=0)
    return Ratio(tuple(Node("ldots") if spelling(part) == "\\ldots " else parse(part) for part in parts))


def _transposed(items: list[Token]) -> Matrix | None:
    """Read a transposed vector, ``(1, 2)^T``, or a transposed matrix; None for any other tokens."""
    start = max((index for index, token in enumerate(items) if token.text == "^"), default=0)
    if start < 2 or "".join(token.text for token in items[start + 1 :]).strip("{}") not in ("T", "top", "intercal"):
        return None
    inner = _read(items[:start])
    if isinstance(inner, Matrix):
        return Matrix(tuple(zip(*inner.rows, strict=True)))
    if not (isinstance(inner, Several) and inner.brackets in ("()", "[]")):
        return None
    rows = tuple((item.whole,) for item in inner.items if isinstance(item, Quantity))
    return Matrix(rows) if len(rows) == len(inner.items) else None


def _point(items: list[Token]) -> Relation | None:
    """Read ``P(1, 2)`` as ``P = (1, 2)``; None for other tokens."""
    start = next((index for index, token in enumerate(items) if token.text == "("), 0)
    name = spelling(items[:start])
    group = _bracketed(items[start:]) if _POINT.fullmatch(name) else None
    if not (isinstance(group, Several) and group.brackets == "()"):
        return None
    return _equation(name, group)


def _bracketed(items: list[Token]) -> Reading | None:
    opener, closer = items[0].text, items[-1].text
    if opener == "langle" and closer == "rangle":
        opener, closer = "(", ")"
        inside = items[1:-1]
    elif len(items) >= 2 and closer in {"(": ")]", "[": ")]", "\\{": ("\\}",), "{": "}"}.get(opener, ()):
        if any(depth == 0 for depth in depths(items)[1:-1]):
            return None
        inside = items[1:-1]
    else:
        return None
    if opener == "\\{" and (built := _set_builder(inside)):
        return built
    parts, separators = split(inside, _separates)
    if opener == "{" and closer == "}":
        old_style = any(token.text in ("over", "choose") for token in inside)  # these need their braces
        return None if old_style else _read(inside)
    if opener == "\\{" and len(parts) == 1:
        return Several((_read(inside),), "{}")
    if not separators:
        content = _read(inside) if (opener, closer) == ("(", ")") else None
        return content if isinstance(content, Quantity | Relation | Several) else None
    if not all(parts) or (opener != "\\{" and set(separators) & JOINERS):
        raise Unreadable("a tuple with an empty place, or joined by words")
    brackets = (opener + closer).replace("\\", "")
    return Several(tuple(_read(part) for part in parts), brackets)


def _set_builder(inside: list[Token]) -> SetBuilder | None:
    bars = [index for index, token in enumerate(inside) if token.kind == "sign" and token.text in ("|", ":")]
    head = _SET_HEAD.fullmatch(spelling(inside[: bars[0]])) if bars else None
    if head is None:
        return None
    return SetBuilder(head[1], head[2] or "", _read(inside[bars[0] + 1 :]))


def _environment(items: list[Token]) -> Reading | None:
    """Read a LaTeX environment: a matrix, a system of equations, or a piecewise value; None without one."""
    wrapped = ""
    if items[0].text in ("[", "(", "\\{") and len(items) > 1 and items[1].text == "begin":
        wrapped = items[0].text
        items = items[1:-1] if items[-1].text in ("]", ")", "\\}") else items[1:]
    if items[0].text != "begin":
        return None
    name_end = next(index for index, token in enumerate(items) if token.text == "}")
    name = "".join(token.text for token in items[2:name_end])
    ends = [index for index, token in enumerate(items) if token.text == "end"]
    if len(ends) != 1 or [token.text for token in items[ends[0] + 1 :]] != [
        token.text for token in items[1 : name_end + 1]
    ]:
        raise Unreadable("nested environments, or something behind one")
    body = items[name_end + 1 : ends[0]]
    if name == "array" and body and body[0].text == "{":
        body = body[next(index for index, token in enumerate(body) if token.text == "}") + 1 :]
    rows, _ = split(body, lambda token: token.kind == "escape" and token.text == "\\\\")
    cells = [split(row, lambda token: token.text == "&")[0] for row in rows if row]
    if name == "cases" or (name in ("array", "aligned") and wrapped == "\\{"):
        return _system(cells)
    if name not in _MATRICES or (name == "array" and wrapped not in ("(", "[")):
        raise Unreadable(f"environment {name}")
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("a matrix with rows of different lengths")
    return Matrix(tuple(tuple(parse(cell) for cell in row) for row in cells))


def _system(cells: list[list[list[Token]]]) -> Reading:
    stripped = [[_without_commas(cell) for cell in row] for row in cells]
    if all(len(row) == 1 for row in stripped):
        return Several(tuple(_read(row[0]) for row in stripped), joined_by="and")
    if all(len(row) == 2 for row in stripped):
        return Cases(tuple((_read(row[0]), _read(_unworded(row[1]))) for row in stripped))
    raise Unreadable("cases")


def _without_commas(items: list[Token]) -> list[Token]:
    return items[:-1] if items and items[-1].text in (",", ";") else items


def _unworded(items: list[Token]) -> list[Token]:
    return items[1:] if items and items[0].kind == "word" and items[0].text in ("if", "for", "when") else items
