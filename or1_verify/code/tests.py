"""The tests of one code problem, as records: what the submission's process may see, and what it may not."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from or1_verify.code.checkers import Checker
from or1_verify.code.codec import encode

_CALL_NAME = re.compile(r"(?:([^\W\d]\w*)\(\)\.)?([^\W\d]\w*)")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """One run of the whole program. ``expected``: text, or for checker any_of a tuple of texts."""

    name: str
    stdin: bytes
    expected: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallTest:
    """One call of a function or method, whose result the row's checker judges.

    ``wrapped``: the one item of the expected list is accepted too. Data whose outputs are lists, not texts, often wrap
    the one result.
    """

    name: str
    function: str
    arguments: list[Any]
    expected: Any
    wrapped: bool = False

    def request(self) -> Mapping[str, Any]:
        """Return all that the submission's process sees of the test."""
        arguments = [encode(item) for item in self.arguments]
        return {"operation": "call", "name": self.function, "arguments": arguments, "keywords": {}}


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """A test program, run in a sandbox of its own. ``stand_ins``: its name for each name of the submission's."""

    name: str
    program: str
    stand_ins: Mapping[str, str]


CodeTest = StdinTest | CallTest | ProgramTest


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The limits that a row sets for each of its tests; None: the configuration's. They apply to submissions only."""

    time_s: float | None = None
    """CPU time; the wall time limit follows it."""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CodeTests:
    """All tests of one problem. ``prefix``: source that is put before the submission's; it expects nothing.

    ``starter``: source whose annotations say which arguments are nodes when the submission's own do not.
    """

    tests: tuple[CodeTest, ...]
    checker: Checker
    prefix: str = ""
    starter: str = ""
    limits: RowLimits = RowLimits()


def is_call_name(text: str) -> bool:
    """Whether ``text`` names a function: ``f``, or ``Solution().f``."""
    match = _CALL_NAME.fullmatch(text)
    return match is not None and not any(keyword.iskeyword(part) for part in match.groups(""))
