"""The types of answers that ``parse_answer.read`` returns. A Reading is one of these types or ``quantity.Quantity``."""

from __future__ import annotations

from dataclasses import dataclass

from or1_verify.math.reader.expression_tree import Node
from or1_verify.math.reader.quantity import Quantity


@dataclass(frozen=True)
class Several:
    """A list, set, tuple or interval. ``brackets``: its opening and closing bracket, such as "[)"; "" for a list."""

    items: tuple[Reading, ...]
    brackets: str = ""
    joined_by: str = ","


@dataclass(frozen=True)
class Dots:
    """An ellipsis among the items of a list."""


@dataclass(frozen=True)
class Relation:
    """A chain ``sides[0] operators[0] sides[1] ...``. ``heads``: for each side its text if it is a name, else ""."""

    operators: tuple[str, ...]
    sides: tuple[Reading, ...]
    heads: tuple[str, ...]

    @property
    def is_inequality(self) -> bool:
        return set(self.operators) <= {"<", "<=", ">", ">="}

    def ascending(self) -> tuple[list[str], list[Reading]] | None:
        """Return (operators, sides) with the smallest side first; None unless all operators point the same way."""
        if set(self.operators) <= {"<", "<="}:
            return list(self.operators), list(self.sides)
        if set(self.operators) <= {">", ">="}:
            return [operator.replace(">", "<") for operator in reversed(self.operators)], list(reversed(self.sides))
        return None


@dataclass(frozen=True)
class Union:
    parts: tuple[Reading, ...]


@dataclass(frozen=True)
class NumberSet:
    """A number set such as ``\\mathbb{R}``."""

    name: str


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Cases:
    """A piecewise value: a (value, condition) pair for each of its rows."""

    rows: tuple[tuple[Reading, Reading], ...]


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Modular:
    value: Reading
    modulus: Node


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Empty:
    """The empty set."""


@dataclass(frozen=True)
class SetBuilder:
    """The set ``\\{variable \\in domain \\mid condition\\}``. ``domain``: the name of a number set, or "" for none."""

    variable: str
    domain: str
    condition: Reading


@dataclass(frozen=True)
class Conditional:
    """An answer with conditions on its letters: ``y = x^2, x > 0``, ``x = k\\pi, k \\in Z``."""

    value: Reading
    conditions: tuple[Reading, ...]


@dataclass(frozen=True)
class Restated:
    """One answer in two notations: ``x < 2 : (-\\infty, 2)``."""

    ways: tuple[Reading, ...]


Reading = (
    Quantity | Several | Dots | Relation | Union | NumberSet | Matrix | Cases | Ratio | Modular | Words | Empty
    | SetBuilder | Conditional | Restated
)  # fmt: skip
