"""The records of a code problem's tests, of three kinds: standard input and output, function calls, test programs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from or1_verify.code.checkers import Checker
from or1_verify.code.codec import encode
from or1_verify.sandbox.limits import ProblemLimits

_CALL_NAME = re.compile(r"(?:([^\W\d]\w*)\(\)\.)?([^\W\d]\w*)")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A test that runs the submission as a program. ``expected``: the right output, or several for any_of."""

    name: str
    stdin: bytes
    expected: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallTest:
    """A test that calls a function or method, whose result the problem's checker compares with ``expected``.

    ``wrapped``: ``expected`` is a list of one item, and that item itself is accepted too, because some data sets wrap
    each result in a list.
    """

    name: str
    function: str
    arguments: list[Any]
    expected: Any
    wrapped: bool = False

    def request(self) -> Mapping[str, Any]:
        """Return the call as the submission's process gets it, without the expected result."""
        arguments = [encode(item) for item in self.arguments]
        return {"operation": "call", "name": self.function, "arguments": arguments, "keywords": {}}


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """A test program, which runs in its own sandbox. ``stand_ins``: name in the program -> name in the submission."""

    name: str
    program: str
    stand_ins: Mapping[str, str]


CodeTest = StdinTest | CallTest | ProgramTest


@dataclass(frozen=True, slots=True)
class CodeTests:
    """All tests of one problem. ``prefix``: source that runs before the submission, and holds no expected results.

    ``starter``: source whose annotations say which arguments are nodes, if the submission has no such annotations.
    """

    tests: tuple[CodeTest, ...]
    checker: Checker
    prefix: str = ""
    starter: str = ""
    limits: ProblemLimits = ProblemLimits()


def is_call_name(text: str) -> bool:
    """Return whether ``text`` names a function or method, as ``f`` or ``Solution().f``."""
    match = _CALL_NAME.fullmatch(text)
    return match is not None and not any(keyword.iskeyword(part) for part in match.groups(""))
