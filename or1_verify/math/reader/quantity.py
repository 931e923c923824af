r"""Reads one value and what stands around it: a unit, a currency, a percent sign, a noun, lead-in words, "minus"."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from or1_verify.math.reader.expression_tree import Node, number_node
from or1_verify.math.reader.normalization import Token, Unreadable
from or1_verify.math.reader.parse_expression import parse
from or1_verify.math.reader.words import (
    HEDGES,
    LEAD_INS,
    MULTIPLIERS,
    NUMBER_WORDS,
    POWER_WORDS,
    SYMBOL_UNITS,
    UNITS,
    change_nothing,
)


@dataclass(frozen=True)
class Quantity:
    """A value, ``tree`` times ``unit``. A unit is (dimension, size): ("length^2", 1/10000) for square centimetres."""

    tree: Node
    unit: tuple[str, Fraction] | None = None
    noun: str = ""
    percent: bool = False
    approximated: bool = False
    rounded: bool = False
    """Whether the value is a decimal gold that ``verify.math.rounding`` takes as rounded."""

    @property
    def whole(self) -> Node:
        """One tree with the unit, percent sign and noun in it, so that the trees of 5 cm and 5 m differ."""
        beside = (self.unit, self.percent, "" if change_nothing(self.noun.split()) else self.noun)
        return Node("beside", (self.tree, Node("sym", name=repr(beside)))) if any(beside) else self.tree

    def approximate(self) -> Quantity:
        return replace(self, approximated=True)


def factors(gold: Quantity, answer: Quantity) -> tuple[Fraction, ...]:
    """Return the factors by which the answer's number may be multiplied to be in the gold's unit or percent form.

    A side without a unit is taken to be in the other side's unit. If only the answer has a percent sign, the factor is
    1/100. The result is () if the two cannot be compared.
    """
    if gold.percent or answer.percent:
        if gold.unit or answer.unit:
            return ()
        if not gold.percent:
            return (Fraction(1, 100),)
        return (Fraction(1),) if answer.percent else (Fraction(1), Fraction(100))
    if gold.unit and answer.unit:
        return (answer.unit[1] / gold.unit[1],) if gold.unit[0] == answer.unit[0] else ()
    return (Fraction(1),)


def scaled(tree: Node, factor: Fraction) -> Node:
    return tree if factor == 1 else Node("mul", (tree, number_node(factor)))


def read_quantity(items: list[Token]) -> Quantity:
    """Read a value. Raises Unreadable if the words around it are more than a unit, a noun or a lead-in."""
    negative = len(items) == 2 and items[0].kind == "word" and items[0].text in ("minus", "negative")
    items = items[1:] if negative else items
    at = next((index for index, token in enumerate(items[:2]) if token.text in SYMBOL_UNITS), None)
    unit = None if at is None or items[0].text not in ("-", items[at].text) else UNITS[SYMBOL_UNITS[items[at].text]]
    items = items if at is None or unit is None else items[:at] + items[at + 1 :]
    end = next((index for index, token in enumerate(items) if token.kind == "word"), len(items))
    body, tail = items[:end], items[end:]
    if not body and tail and tail[0].text in NUMBER_WORDS:
        unit_behind = _unit(tail[1:])
        if unit_behind is None and len(tail) > 1:
            raise Unreadable("words behind a number word")
        return _signed(Quantity(number_node(NUMBER_WORDS[tail[0].text]), unit_behind), negative)
    percent = False
    if body and body[-1].text == "%" and not tail:
        percent, body = True, body[:-1]
    elif tail and tail[0].text in ("percent", "percents", "pct", "percentage") and len(tail) == 1:
        percent, tail = True, []
    if body and body[-1].text in SYMBOL_UNITS and unit is None:
        unit, body = UNITS[SYMBOL_UNITS[body[-1].text]], body[:-1]
    multiplier = MULTIPLIERS.get(tail[0].text) if body and tail and not percent else None
    tail = tail if multiplier is None else tail[1:]
    noun = ""
    if tail:
        unit_behind, noun = _tail(tail)
        if unit_behind is not None and unit is not None and unit_behind != unit:
            raise Unreadable("two units")
        unit = unit or unit_behind
    tree = parse(body)
    if multiplier is not None:
        tree = _multiplied(tree, multiplier)
    if unit is None and (degrees := _degrees(tree)) is not None:
        return _signed(Quantity(degrees, UNITS["degree"], noun), negative)
    return _signed(Quantity(tree, unit, noun, percent), negative)


def _multiplied(tree: Node, multiplier: int | Fraction) -> Node:
    """Return a number times a word, as in ``1.2 million`` or ``5 thirds``. Raises Unreadable for other trees."""
    if tree.op != "num":
        raise Unreadable("a multiplier behind what is no number")
    return number_node(tree.number * multiplier)


def _signed(quantity: Quantity, negative: bool) -> Quantity:
    return replace(quantity, tree=Node("neg", (quantity.tree,))) if negative else quantity


def without_lead_in(items: list[Token], keep: int = 1) -> list[Token]:
    """Return the tokens without "the answer is" or similar words in front; at least ``keep`` tokens stay."""
    dropped: list[str] = []
    while len(items) > keep and items[0].kind == "word" and items[0].text in LEAD_INS:
        dropped.append(items[0].text)
        items = items[1:]
    if dropped[-1:] == ["of"] and dropped[-2:-1] != ["total"]:
        raise Unreadable("what something of a value is")  # the sum of 5
    return items


def _degrees(tree: Node) -> Node | None:
    if tree.op == "degree":
        return tree.args[0]
    if tree.op == "neg" and tree.args[0].op == "degree":
        return Node("neg", tree.args[0].args)
    return None


def _tail(items: list[Token]) -> tuple[tuple[str, Fraction] | None, str]:
    """Read the words behind a number: return (unit, "") or (None, noun)."""
    unit = _unit(items)
    if unit is not None:
        return unit, ""
    for token in items:
        if token.kind not in ("word", "symbol") and token.text not in ("(", ")", "-", "'"):
            raise Unreadable("something behind a word")
        if token.text in HEDGES:
            raise Unreadable(f"the word {token.text!r}")
    return None, " ".join(token.text for token in items if token.kind in ("word", "symbol"))


def _unit(items: list[Token]) -> tuple[str, Fraction] | None:
    """Read a unit: ``cm``, ``cm^2``, ``square cm``, ``km/h``, ``kilometers per hour``."""
    at, factors, sign = 0, [], 1
    while at < len(items):
        power = 1
        if items[at].text in POWER_WORDS and at + 1 < len(items):
            power, at = POWER_WORDS[items[at].text], at + 1
        name = items[at].text
        if items[at].kind not in ("word", "symbol") or name not in UNITS:
            return None
        at += 1
        written, at = _written_power(items, at)
        factors.append((UNITS[name], power * written * sign))
        if at < len(items):
            if sign < 0 or at + 1 == len(items):
                return None
            if items[at].text in ("/", "per"):
                sign, at = -1, at + 1
            elif items[at].text == "cdot":
                at += 1
    if not factors:
        return None
    powers: Counter[str] = Counter()
    for unit, power in factors:
        powers[unit[0]] += power
    dimension = "/".join(f"{name}^{power}" for name, power in sorted(powers.items()))
    size = Fraction(1)
    for unit, power in factors:
        size *= unit[1] ** power
    return factors[0][0] if len(factors) == 1 and factors[0][1] == 1 else (dimension, size)


def _written_power(items: list[Token], at: int) -> tuple[int, int]:
    """Read a unit's power at index ``at``: ``^2``, ``^{-1}``, "squared", or none. Return (power, index behind it)."""
    texts = [token.text for token in items[at : at + 5]]
    if texts[:1] in (["squared"], ["cubed"]):
        return {"squared": 2, "cubed": 3}[texts[0]], at + 1
    if texts[:1] != ["^"]:
        return 1, at
    written = re.match(r"\^ (?:({ )?)((?:- )?[1-3])(?!\d)(?(1) })", " ".join(texts))
    if written is None:
        raise Unreadable("a unit to a power")
    return int(written[2].replace(" ", "")), at + len(written[0].split())


def read_compound(items: list[Token]) -> Quantity | None:
    """Read ``2 hours 30 minutes``, with or without "and". Return None unless the units measure the same dimension."""
    items = [token for token in items if token.text != "and"]
    if len(items) < 4 or len(items) % 2:
        return None
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if any(number.kind != "number" or word.kind != "word" or word.text not in UNITS for number, word in pairs):
        return None
    units = [UNITS[word.text] for _, word in pairs]
    if len({dimension for dimension, _ in units}) != 1 or any(a[1] <= b[1] for a, b in pairwise(units)):
        return None
    try:
        total = sum(
            (Fraction(number.text) * unit[1] for (number, _), unit in zip(pairs, units, strict=True)), Fraction(0)
        )
    except ValueError:
        return None
    return Quantity(number_node(total / units[0][1]), units[0])
