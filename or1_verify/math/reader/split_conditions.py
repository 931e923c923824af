r"""Splits an answer from the conditions on its letters: ``k \in \mathbb{Z}``, "where n is ...", "with domain [0, 1]".

Each phrase becomes a condition ``letter \in ...`` with a number set, an interval, or words that no rule knows, so two
answers that say different things about a letter differ. Inequalities stay in the answer, behind a comma.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from or1_verify.math.reader.answer_types import NumberSet, Reading, Relation, Words
from or1_verify.math.reader.brackets import depths, spelling, split
from or1_verify.math.reader.expression_tree import Node
from or1_verify.math.reader.normalization import Token, Unreadable
from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.words import QUALIFIERS

ORDERS = {"<", ">", "le", "ge", "ne"}
_MEMBER = re.compile(r"([a-zA-Z])\\in \\mathbb \{([RZNQC])\}((?:[\^_](?:\{[^{}]*\}|\\[a-z]+ |\S))?)")
_NAMES = dict.fromkeys(("N*", "N+", "Z+", "N>0", "Z>0", "N\\ge 1", "Z\\ge 1"), "Z+") | dict.fromkeys(
    ("N0", "N\\ge 0", "Z\\ge 0"), "N0"
)
_EACH = {"all", "any", "every", "each", "some", "the", "a", "an"}
_FILLING = _EACH | {"is", "are", "be", "being", "can", "number", "numbers", "value", "values", "of", "where", "for"}
_KINDS = {
    ("real",): "R",
    ("rational",): "Q",
    ("natural",): "N",
    ("integer",): "Z",
    ("integer", "positive"): "Z+",
    ("positive-integer",): "Z+",
    ("integer", "non-negative"): "N0",
    ("integer", "nonnegative"): "N0",
}
_ARGUMENT = re.compile(r"[A-Za-z]\w*\(([a-z])\)=")


def split_off(items: list[Token], read: Callable[[list[Token]], Reading]) -> tuple[list[Token], tuple[Reading, ...]]:
    """Return (the answer without its conditions, the conditions). ``read`` reads the tokens of a condition."""
    items, phrase = _behind_word(items)
    items = _unwrapped(items)
    items, members = _members(items)
    if items and items[-1].text == ",":
        items = items[:-1]
    parts = split(phrase, lambda token: token.text in (",", "and"))[0]
    conditions = [condition for part in parts for condition in _conditions(part, items, read)]
    return items, (*map(_member, members), *conditions)


def _behind_word(items: list[Token]) -> tuple[list[Token], list[Token]]:
    """Return (the answer, the words behind "for", "where" or "with"). An inequality stays in the answer."""
    around = depths(items)
    for index, token in enumerate(items):
        if token.kind == "word" and token.text in QUALIFIERS and around[index] <= 1 and index > 0:
            opened = index - 1 if around[index] == 1 else index
            if around[index] == 1 and (items[opened].text != "(" or items[-1].text != ")"):
                break
            phrase = items[index + 1 : len(items) - around[index]]
            if _has_order(phrase):
                return [*items[:opened], Token("sign", ","), *_without_each(phrase)], []
            return items[:opened], phrase
        on = token.kind == "word" and token.text == "on" and around[index] == 0 and _is_interval(items[index + 1 :])
        if on and any(before.text == "=" for before in items[:index]):
            return items[:index], [Token("word", "domain"), *items[index + 1 :]]
    return items, []


def _has_order(items: Sequence[Token]) -> bool:
    return any(token.kind != "word" and token.text in ORDERS for token in items)


def _is_interval(items: Sequence[Token]) -> bool:
    return len(items) > 2 and items[0].text in ("(", "[") and items[-1].text in (")", "]")


def _without_each(items: list[Token]) -> list[Token]:
    while items and items[0].kind == "word" and items[0].text in _EACH | {"real"}:
        items = items[1:]
    return items


def _unwrapped(items: list[Token]) -> list[Token]:
    """Take the parentheses off a condition at the end, ``(k \\in Z)`` or ``(x > 0)``, and put a comma before it."""
    if items and items[-1].text == ")" and not any(token.text == "," for token in items):
        start = max(index for index, depth in enumerate(depths(items)[:-1]) if depth == 0)
        inside = items[start + 1 : -1]
        if start > 0 and items[start].text == "(" and (_is_member(inside) or _has_order(inside)):
            return [*items[:start], Token("sign", ","), *inside]
    return items


def _is_member(items: Sequence[Token]) -> bool:
    return _MEMBER.fullmatch(spelling(items)) is not None


def _members(items: list[Token]) -> tuple[list[Token], list[list[Token]]]:
    """Return (the rest of the answer, its conditions like ``k \\in Z``). If all are conditions, none is split off.

    ``x \\in R`` counts as a condition only if another part has x.
    """
    parts, separators = split(items, lambda token: token.text == "," or (token.kind == "word" and token.text == "and"))
    members = [part for part in parts if _is_member(part) and (not _is_real(part) or _is_used(part, parts))]
    if not members or len(members) == len(parts):
        return items, []
    kept: list[Token] = []
    for part, separator in zip(parts, ["", *separators], strict=True):
        if part not in members:
            kept += [Token("word" if separator == "and" else "sign", separator), *part] if kept else part
    return kept, members


def _is_real(part: Sequence[Token]) -> bool:
    return spelling(part).endswith("\\mathbb {R}")


def _is_used(part: Sequence[Token], parts: Sequence[Sequence[Token]]) -> bool:
    return any(token.text == part[0].text for other in parts if other is not part for token in other)


def _conditions(part: list[Token], items: Sequence[Token], read: Callable[[list[Token]], Reading]) -> Iterator[Reading]:
    """Yield the conditions that a phrase states: "all real x", "domain (0, 1)", ``x = 0``, or words without a rule."""
    part = _without_each(part) if any(token.text == "in" and token.kind == "command" for token in part) else part
    if part and part[0].text == "domain":
        part = [_argument(items), Token("command", "in"), *(token for token in part[1:] if token.text not in ":=")]
    try:
        reading = read(part)
    except Unreadable:
        reading = None
    if isinstance(reading, Relation) and reading.heads[0]:
        yield reading
        return
    words = [token.text for token in part if token.kind == "word"]
    letters = [token for token in part if token.kind == "symbol" and (token.text != "a" or not words)]
    kind = tuple(sorted({word.removesuffix("s") for word in words if word not in _FILLING}))
    spelled = any(a.kind == b.kind == "symbol" and not b.spaced for a, b in pairwise(part))  # "for big n"
    unread = (spelled and not kind) or any(token.kind not in ("word", "symbol") for token in part)
    constant = any(token.text == "=" for token in items) and _argument(items).text not in {
        letter.text for letter in letters
    }  # f(x) = cx for some c
    if unread or (not kind and "some" in words and not constant):
        kind = ("some",)
    if kind and not set(kind) & {"constant", "parameter"}:
        words_said = Words(" ".join(kind))
        said = NumberSet(_KINDS[kind]) if kind in _KINDS else words_said
        yield from (_within(letter.text, said) for letter in letters) if letters else (words_said,)


def _argument(items: Sequence[Token]) -> Token:
    """Return the variable of a formula: t for ``f(t) =``, else the only letter of the right side, else x."""
    if match := _ARGUMENT.match(spelling(items)):
        return Token("symbol", match[1])
    start = next((index for index, token in enumerate(items) if token.text == "="), -1)
    letters = {token.text for token in items[start + 1 :] if token.kind == "symbol"} - {"e", "i"}
    return Token("symbol", letters.pop() if len(letters) == 1 else "x")


def _member(items: Sequence[Token]) -> Reading:
    match = _MEMBER.fullmatch(spelling(items))
    assert match is not None
    name = match[2] + re.sub(r"[{}^_]", "", match[3])
    return _within(match[1], NumberSet(_NAMES.get(name, name)))


def _within(letter: str, said: Reading) -> Reading:
    return Relation(("in",), (Quantity(Node("sym", name=letter)), said), (letter, ""))
