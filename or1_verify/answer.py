"""Finds the answer in a response: after the reasoning, in the last box."""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_BOX = re.compile(
    r"(?:(?P<bare>\\boxed|\x08oxed|(?<![A-Za-z\\])b?oxed(?=\{))|\\fbox|\\framebox|\\colorbox\s*\{\w+\})(?![A-Za-z])\s*"
)
_BARE = re.compile(r"[^\s${][^$\n]*")
_BETWEEN = re.compile(r"(?:[\s$,;]|\\[,;()\[\]]|\\text\s*\{\s*and\s*\}|\band\b|和)*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


REASONING_TAGS = (
    (THINK_OPEN, THINK_CLOSE),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""How models mark their reasoning: (opened, closed)."""


def after_reasoning(response: str) -> str | None:
    """Return the text after the reasoning, all of it if a model marks none; None when the reasoning never closes.

    A chat template that ends its prompt with an open tag has opened the reasoning (``left_open``): whoever samples puts
    that tag before the response. One that opens another tag behind the reasoning, and does not close it, is still
    reasoning.
    """
    ends = [response.rfind(closed) + len(closed) for _, closed in REASONING_TAGS if closed in response]
    answer = response[max(ends, default=0) :]
    return None if any(opened in answer for opened, _ in REASONING_TAGS) else answer


def left_open(prompt: str) -> str:
    """Return the tag of reasoning at the end of a prompt in text, which the response has to close; "" without one."""
    return next((opened for opened, _ in REASONING_TAGS if prompt.rstrip().endswith(opened)), "")


def last_box(text: str) -> str | None:
    r"""Return what the last box holds, braces balanced and white space trimmed; "" when that box is broken.

    Boxes are ``\boxed``, ``\fbox`` and ``\framebox`` with braces, and ``\boxed`` before a value without any. Several
    boxes at the end with nothing but commas and "and" between them are one list. None: there is no box at all. A last
    box that is empty or never closes is an answer that cannot be read, so an earlier box does not stand in for it.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    content, _ = _boxed(text, boxes[-1])
    contents, first = [content], boxes[-1].start()
    for box in reversed(boxes[:-1]):
        earlier, end = _boxed(text, box)
        if end is None or end > first or not _BETWEEN.fullmatch(text[end:first]):
            break
        contents.insert(0, earlier)
        first = box.start()
    if len(set(contents)) == 1 or not all(contents):
        return content
    return ", ".join(contents)


def _boxed(text: str, box: re.Match[str]) -> tuple[str, int | None]:
    """Return the content of a box and the index behind its braces; without braces the formula's rest and None."""
    if text[box.end() : box.end() + 1] == "{":
        end = closing_brace(text, box.end())
        return ("", None) if end is None else (text[box.end() + 1 : end].strip(), end + 1)
    bare = _BARE.match(text, box.end()) if box["bare"] else None
    return bare[0].strip().rstrip(".") if bare else "", None


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at ``start``, or None. ``\{`` and ``\}`` are not braces."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.start()
    return None
