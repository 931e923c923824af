"""Whether the math verifier takes a boxed answer, for tests that hold tables of pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from or1_verify.math.verifier import MathVerifier
from or1_verify.types import Message, Problem

IsRight = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def is_right() -> Iterator[IsRight]:
    """``is_right(gold, answer)``: through the worker, where Math-Verify judges what the reader cannot read."""
    verifier = MathVerifier(timeout_s=60.0)

    def judged(gold: str, answer: str) -> bool:
        problem = Problem("id", "s", "math", (Message("user", "q"),), json.dumps([gold]), {}, "x.jsonl:1")
        return verifier.verify(problem, rf"</think>\boxed{{{answer}}}", truncated=False).status == "right"

    yield judged
    verifier.close()
