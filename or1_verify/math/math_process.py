r"""The child process in which the math verifier compares an answer with the golds, by our rules or by Math-Verify.

Our rules are in ``math.reader``. If the process's first argument is ``math_verify``, it judges by Math-Verify, as the
released code does.

Requests are ``{"golds": [...], "answer": ..., "rounding": bool}``, and for Math-Verify ``{"golds": [...], "answer":
text}``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from or1_verify.child_process import serve
from or1_verify.math.reader.judge import is_readable, judge
from or1_verify.math.reader.normalization import Unreadable
from or1_verify.types import VerdictStatus

_CHILD_MEMORY_BYTES = 4 << 30


def _ready() -> Callable[[dict[str, Any]], dict[str, Any]]:
    logging.disable(logging.CRITICAL)
    if sys.argv[1] != "math_verify":
        return _verify
    _parse_boxed("\\frac{1}{2}")  # builds the slow parser before "ready", when no time limit runs
    return _verify_as_released


def _said(status: VerdictStatus, answer: str, detail: str) -> dict[str, Any]:
    return {"status": status, "answer": answer, "detail": detail}


def _verify(request: dict[str, Any]) -> dict[str, Any]:
    golds: list[str] = request["golds"]
    text: str = request["answer"]
    if text in golds:
        return _said("right", text, "the same text")
    how = ""
    for gold in golds:
        try:
            right, how = judge(gold, text, request["rounding"])
        except (Unreadable, RecursionError):
            how = "the answer cannot be read as what the gold is"
            continue
        if right:
            return _said("right", text, how)
    if not any(map(is_readable, golds)):
        if "".join(text.split()) in ("".join(gold.split()) for gold in golds):
            return _said("right", text, "the same text")
        return _said("unreadable", text, "the gold cannot be read")
    return _said("wrong", text, how)


def _verify_as_released(request: dict[str, Any]) -> dict[str, Any]:
    """Judge as the released code does, on the whole text that follows the reasoning (RECIPE, verifiers).

    The extracted string is compared with each gold; then Math-Verify compares values. An error counts as not right.
    """
    from math_verify import verify

    extracted = _parse(request["answer"])
    if len(extracted) < 2:
        return _said("no_answer", "", "Math-Verify found no answer in the text")
    answer = str(extracted[-1]).strip()  # Math-Verify puts the text last
    if extracted[1] in request["golds"]:
        return _said("right", answer, "the same text, by Math-Verify's extraction")
    for gold in request["golds"]:
        try:
            right = verify(list(_parse_boxed(gold)), list(extracted), timeout_seconds=None)
        except MemoryError:
            raise
        except Exception:  # the released verifier goes on with the next gold
            continue
        if right:
            return _said("right", answer, "compared by Math-Verify")
    return _said("wrong", answer, "compared by Math-Verify")


@lru_cache(maxsize=512)  # the M responses to a problem share its golds
def _parse_boxed(content: str) -> Sequence[Any]:
    """Parse a bare gold inside a box, because parsing it bare can change its meaning (RECIPE section 8)."""
    return _parse(f"\\boxed{{{content}}}")


def _parse(text: str) -> Sequence[Any]:
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))  # None: the parent ends this process


if __name__ == "__main__":
    serve(_ready, _CHILD_MEMORY_BYTES)
