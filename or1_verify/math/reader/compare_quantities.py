r"""Decides when two values are the same answer: equal numbers, simplified as far as the gold, with units that agree."""

from __future__ import annotations

from or1_verify.math.reader.expression_equality import same
from or1_verify.math.reader.expression_tree import Node, operations, symbols
from or1_verify.math.reader.normalization import FUNCTION_FAMILIES
from or1_verify.math.reader.numerals import decimals, is_numeral
from or1_verify.math.reader.numeric_value import real
from or1_verify.math.reader.quantity import Quantity, factors, scaled
from or1_verify.math.reader.rounding import rounds_to
from or1_verify.math.reader.words import UNITS, change_nothing

_TRIGONOMETRIC = FUNCTION_FAMILIES[0]
_FAMILIES = (
    *FUNCTION_FAMILIES,
    frozenset({"factorial", "binom", "perm"}),
    frozenset({"sum", "prod"}),
    frozenset({"floor", "ceil"}),
)


def is_worked_out(gold: Node, answer: Node) -> bool:
    """Return whether the answer is worked out as far as the gold.

    If the gold is a plain number, the answer must be a plain number. Otherwise the answer must have the gold's letters.
    If the answer applies a function to constants, the gold must have a function of the same family: sin 15° does not
    answer "What is sin 15°?".
    """
    if is_numeral(gold):
        return is_numeral(answer)
    if symbols(gold) != symbols(answer):  # the letters of dV/dt, which would cancel
        return False
    allowed = operations(gold)
    functions = {node.op for node in answer.walk() if node.args and not symbols(node)}  # of constants
    return all(family & allowed for family in _FAMILIES if family & functions)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether the answer has the gold's value, with regard to units and percent signs."""
    if answer.approximated and not (gold.approximated or decimals(gold.tree)):
        return False
    if gold.noun and answer.noun and _noun(gold.noun) != _noun(answer.noun):
        return False
    if not gold.noun and not _words_change_nothing(answer):
        return False
    if (gold.unit and answer.noun) or (answer.unit and gold.noun):
        return False
    if gold.rounded and rounds_to(answer, gold):
        return True
    if gold.approximated and not (gold.percent or answer.percent):
        return any(_rounds_to(scaled(answer.tree, factor), gold.tree) for factor in factors(gold, answer))
    if UNITS["degree"] in (gold.unit, answer.unit) and None in (gold.unit, answer.unit):
        bare, other = (answer.tree, gold.tree) if gold.unit else (gold.tree, answer.tree)
        if "pi" in operations(bare):  # radians
            return same(bare, Node("degree", (other,)))
    ours, theirs = _in_degrees(gold.tree, answer.tree)
    return is_worked_out(ours, theirs) and any(same(ours, scaled(theirs, factor)) for factor in factors(gold, answer))


def _in_degrees(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Remove the degree signs if only one side has any and neither has pi or a sine: ``180^\\circ - x`` is 180 - x."""
    used = operations(gold), operations(answer)
    if ("degree" in used[0]) == ("degree" in used[1]) or (used[0] | used[1]) & {"pi", *_TRIGONOMETRIC}:
        return gold, answer
    bare = [tree.replaced(lambda node: node.args[0] if node.op == "degree" else None) for tree in (gold, answer)]
    return bare[0], bare[1]


def _words_change_nothing(answer: Quantity) -> bool:
    if answer.tree.op == "sym" and answer.noun:  # "A rectangle", "I think"
        return False
    return change_nothing(answer.noun.split())


def _noun(text: str) -> str:
    return " ".join("radian" if word == "rad" else word.rstrip("s") for word in text.split())


def _rounds_to(answer: Node, gold: Node) -> bool:
    ours, theirs = real(gold), real(answer)
    if ours is None or theirs is None or not is_numeral(gold):
        return same(gold, answer)
    return bool(abs(ours - theirs) <= (0.5 + 1e-9) * 10.0 ** -decimals(gold))
