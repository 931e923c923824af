"""The expression tree of a formula, and the exact value of a numeral's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from or1_verify.math.reader.normalization import Unreadable

_MAX_DIGITS = 4000
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
GREEK = frozenset(_GREEK.split())


@dataclass(frozen=True, slots=True)
class Node:
    """An operation ``op`` on ``args``. A number has its text in ``name``, a symbol its name."""

    op: str
    args: tuple[Node, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""

    def walk(self) -> Iterator[Node]:
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += node.args

    def replaced(self, by: Callable[[Node], Node | None]) -> Node:
        """Replace each node by ``by(node)``. If the result is None, keep the node and replace within its arguments."""
        other = by(self)
        return other or Node(self.op, tuple(node.replaced(by) for node in self.args), self.number, self.name)


def symbols(tree: Node) -> frozenset[str]:
    """Return the variables of an expression; i and e are constants."""
    return frozenset(node.name for node in tree.walk() if node.op == "sym" and node.name not in ("i", "e"))


def operations(tree: Node) -> frozenset[str]:
    return frozenset(node.op for node in tree.walk())


def number_node(value: Fraction | int) -> Node:
    return Node("num", number=Fraction(value), name=str(value))


def number_of(spelling: str) -> Fraction:
    """Return a numeral's exact value. Repeating digits have a bar or dot, or stand 3 times or more before ``...``."""
    if len(spelling) > _MAX_DIGITS:
        raise Unreadable("a numeral of thousands of digits")
    if barred := re.fullmatch(r"(\d*)\.(\d*)\\(?:overline|dot)\s*\{?(\d+)\}?", spelling):
        return _repeating(*barred.groups())
    if elided := re.fullmatch(r"(\d*)\.(\d*?)(\d{1,6}?)\3{2,}\s*(?:\\ldots|\.\.\.)", spelling):
        return _repeating(*elided.groups())
    mantissa, _, exponent = spelling.lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_DIGITS:
        raise Unreadable("a numeral of thousands of digits")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _repeating(whole: str, fixed: str, block: str) -> Fraction:
    scale = 10 ** len(fixed)
    return Fraction(int(whole or "0")) + (int(fixed or "0") + Fraction(int(block), 10 ** len(block) - 1)) / scale
