"""Finds the answer in a response: after the reasoning, in the last box."""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_BOX = "\\boxed"
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def after_reasoning(response: str) -> str | None:
    """Return the text after the last ``</think>``, or None when the reasoning never closes.

    The chat template's generation prompt opens ``<think>``, so a response normally holds the closing tag alone. One
    that opens another ``<think>`` afterwards and does not close it is still reasoning, so it gives None.
    """
    _, closed, answer = response.rpartition(THINK_CLOSE)
    if not closed or THINK_OPEN in answer:
        return None
    return answer


def last_box(text: str) -> str | None:
    r"""Return what the last ``\boxed{...}`` holds, braces balanced and white space trimmed; "" when that box is broken.

    Returns None when there is no box at all. A last box that is empty or never closes is an answer that cannot be read,
    so an earlier box does not stand in for it.
    """
    start = text.rfind(_BOX)
    while start >= 0:
        after = start + len(_BOX)
        if not text[after : after + 1].isalpha():  # \boxedfoo is another macro
            return _braced(text, after)
        start = text.rfind(_BOX, 0, start)
    return None


def _braced(text: str, start: int) -> str:
    """Return the content of the braces that open at ``start``, after any white space; "" when there is none."""
    start = len(text) - len(text[start:].lstrip())
    end = closing_brace(text, start) if text[start : start + 1] == "{" else None
    return "" if end is None else text[start + 1 : end].strip()


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at ``start``, or None. ``\{`` and ``\}`` are not braces."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.start()
    return None
