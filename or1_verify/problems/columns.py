"""The record that a row of any published set becomes, and type-checked access to a row's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from or1_verify.problems.rows import MISSING, RowError, shown


@dataclass(frozen=True, slots=True)
class Published:
    """One problem read from a row of any column layout. ``source``: the part of the set that the row names, or ""."""

    ability: str
    statement: str
    ground_truth: str
    """In the form of Skywork-OR1-RL-Data; "" if the row has no answer or no tests."""
    source: str = ""
    instructions: str = ""
    solutions: tuple[str, ...] = ()
    difficulty: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""
    """Text of the prompt before the statement; ``instructions`` is the text after it."""

    @property
    def content(self) -> str:
        """The text of the user's message: opening, statement, instructions."""
        return self.opening + self.statement + self.instructions


@dataclass(frozen=True, slots=True)
class Columns:
    """Access to the columns of one row; each method checks the value's type, and raises RowError if it is wrong."""

    row: Mapping[str, Any]
    layout: str
    origin: str

    def text(self, *names: str) -> str:
        """Return the text, stripped, of the first column in ``names`` that the row has; "" for null."""
        return self.verbatim(*names).strip()

    def verbatim(self, *names: str) -> str:
        """Return a column's text unstripped, because each character of a prompt counts; "" for null or white space."""
        name = self._first(names)
        value = self.row[name]
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(name, f"found {shown(value)}, expected text")
        return value if value.strip() else ""

    def answer(self, *names: str) -> str:
        """Return a column's answer, which is text or a number, as text; "" for null and words such as "none"."""
        name = self._first(names)
        value = self.row[name]
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._wrong(name, f"found {shown(value)}, expected text or a number")
        whole = isinstance(value, float) and value.is_integer()  # as amc23's 27.0
        text = str(int(value) if whole else value).strip()
        return "" if text.lower() in MISSING else text

    def texts(self, name: str) -> list[str]:
        """Return a column's list of texts; an empty list for null, or if the row has no such column."""
        value = self.row.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, f"found {shown(value)}, expected a list of texts")
        return value

    def optional(self, name: str) -> str:
        return self.text(name) if name in self.row else ""

    def decoded(self, name: str, kind: type) -> Any:
        """Return a column's value of type ``kind``, decoded from JSON if it is text; None if it is empty or null."""
        value = self.row[self._first((name,))]
        if isinstance(value, str):
            if not value.strip():
                return None
            try:
                value = json.loads(value)
            except ValueError as error:
                expected = f"expected the JSON of a {kind.__name__}"
                raise self._wrong(name, f"not JSON ({error}), found {shown(value)}; {expected}") from None
        if value is not None and not isinstance(value, kind):
            raise self._wrong(name, f"found {shown(value)}, expected a {kind.__name__}")
        return value

    def _first(self, names: tuple[str, ...]) -> str:
        for name in names:
            if name in self.row:
                return name
        missing = f"no column '{' or '.join(names)}'"
        raise RowError(
            self.origin, missing, f"{missing}, which layout '{self.layout}' has; this row has {sorted(self.row)}"
        )

    def _wrong(self, name: str, detail: str) -> RowError:
        return RowError(self.origin, f"column '{name}' has a wrong type", f"column '{name}': {detail}")


def some(*solutions: Any) -> tuple[str, ...]:
    """Return the arguments that are text and not empty."""
    return tuple(solution for solution in solutions if isinstance(solution, str) and solution)


def golds(answer: str) -> str:
    return json.dumps([answer], ensure_ascii=False) if answer else ""


def of_code(statement: str, truth: Any, **more: Any) -> Published:
    """Return a code problem whose ground truth is ``truth`` as JSON; an empty ``truth`` gives ""."""
    return Published("code", statement, json.dumps(truth, ensure_ascii=False) if truth else "", **more)
