"""The tests of one code problem, as records: what the submission's process may see, and what it may not."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from or1_verify.code.checkers import Checker
from or1_verify.code.codec import encode

Comparison = Literal["json", "wrapped", "python", "identity", "truth"]
"""How a call's result is judged. json: by the row's checker. wrapped: likewise, but the expected list's one item is
accepted too (data whose outputs are lists, not texts, often wrap the one result). python: by ``==`` of decoded built-in
values. identity: by ``is`` with True, False or None. truth: by its truth value."""

_CALL_NAME = re.compile(r"(?:([^\W\d]\w*)\(\)\.)?([^\W\d]\w*)")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """One run of the whole program. ``expected``: text, or for checker any_of a tuple of texts."""

    name: str
    stdin: bytes
    expected: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallTest:
    """One call. ``request`` is all that the submission's process sees of it."""

    name: str
    request: Mapping[str, Any]
    expected: Any
    comparison: Comparison


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


def call_request(name: str, arguments: list[Any], keywords: Mapping[str, Any], typed: bool) -> Mapping[str, Any]:
    """Return the request for a call. ``typed``: level-order lists become nodes where the annotations say so."""
    return {
        "operation": "call",
        "name": name,
        "arguments": [encode(item) for item in arguments],
        "keywords": {key: encode(item) for key, item in keywords.items()},
        "typed": typed,
    }


def is_call_name(text: str) -> bool:
    """Whether ``text`` names a function: ``f``, or ``Solution().f``."""
    match = _CALL_NAME.fullmatch(text)
    return match is not None and not any(keyword.iskeyword(part) for part in match.groups(""))
