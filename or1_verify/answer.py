"""Extracts the answer from a response: the text after the reasoning (``</think>``), and the last ``\\boxed``."""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_BOX = re.compile(
    r"(?:(?P<bare>\\boxed|\x08oxed|(?<![A-Za-z\\])b?oxed(?=\{))|\\(?:fbox|framebox|bbox)(?:\s*\[[^\]]*\])*"
    r"|\\(?:fcolorbox\s*\{\w+\}|colorbox)\s*\{\w+\})(?![A-Za-z])\s*"
)
_BARE = re.compile(r"[^\s${][^$\n]*")
_JOINED = "(?:and|or|und|oder|et|ou|y|o|also|either|maybe|perhaps|possibly)"
_NAME = r"[A-Za-z](?:_\w)?\s*="
_BETWEEN = re.compile(
    rf"(?:[\s$,;&/|]|\\[,;()\[\]]|\\q?quad|\\text\s*\{{\s*{_JOINED}\s*\}}|\b{_JOINED}\b|[和或与と、]|或者|{_NAME})*"
)
_NAMED = re.compile(rf"(?<![A-Za-z\\])({_NAME})[\s$]*$")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


REASONING_TAGS = (
    (THINK_OPEN, THINK_CLOSE),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Pairs of tags that open and close the reasoning in responses of different models."""


def after_reasoning(response: str) -> str | None:
    """Return the part of a response that follows its reasoning; None if the reasoning is not closed.

    A response without reasoning tags is returned whole. If the chat template ends the prompt with an open tag
    (``left_open`` returns this tag), the caller must put the tag before the response.
    A response that opens a second tag after closing the first, and does not close the second, is still reasoning.
    """
    ends = [response.rfind(closed) + len(closed) for _, closed in REASONING_TAGS if closed in response]
    answer = response[max(ends, default=0) :]
    return None if any(opened in answer for opened, _ in REASONING_TAGS) else answer


def left_open(prompt: str) -> str:
    """Return the open reasoning tag at the end of a prompt, which the response must close; "" if there is none."""
    return next((opened for opened, _ in REASONING_TAGS if prompt.rstrip().endswith(opened)), "")


def last_box(text: str) -> str | None:
    r"""Return the trimmed content of a text's last box: "" if it is empty or not closed, None if there is no box.

    Boxes are ``\boxed``, ``\fbox`` and the like with balanced braces, and ``\boxed`` before a value without braces.
    Boxes with only commas, "and", "or" and names (``x =``) between them are one list. An earlier box never replaces
    a last box that cannot be read.
    """
    contents = _last_boxes(text)
    return ", ".join(contents) if contents else None


def is_answered_once(text: str) -> bool:
    """Return whether all boxes of a text agree with the last box, or with the last list of boxes (``last_box``).

    A box agrees if its content equals the content of a listed box, or the part of that content after its first "=".
    """
    last = {part for content in _last_boxes(text) for part in (content, content.partition("=")[2])}
    contents = [_boxed(text, box)[0] for box in _BOX.finditer(text)]
    return all(content in last or _BOX.search(content) for content in contents)


def _last_boxes(text: str) -> list[str]:
    """Return [the last box's content], or, if the last boxes form one list, each content after its name (``x =``)."""
    found: list[tuple[str, str]] = []
    first = len(text)
    for box, content, end in reversed(_outermost(text)):
        if found and (end is None or end > first or not _BETWEEN.fullmatch(text[end:first])):
            break
        first = box.start()
        named = _NAMED.search(text, max(0, first - 20), first)
        found.insert(0, (named[1] if named else "", content))
    contents = [content for _, content in found]
    joined = len(set(contents)) > 1 and all(contents)
    return [name + content for name, content in found] if joined else contents[-1:]


def _outermost(text: str) -> list[tuple[re.Match[str], str, int | None]]:
    """Return (match, content, end) of each outermost box. If a box holds only a box, content is the inner one's."""
    outermost: list[tuple[re.Match[str], str, int | None]] = []
    last = 0
    for box in _BOX.finditer(text):
        if box.start() >= last:
            content, end = _boxed(text, box)
            last = end or last
            while (inner := _BOX.match(content)) and (nested := _boxed(content, inner))[1] == len(content):
                content = nested[0]
            outermost.append((box, content, end))
    return outermost


def _boxed(text: str, box: re.Match[str]) -> tuple[str, int | None]:
    """Return a box's (content, index after its closing brace); without braces, (the rest of the formula, None)."""
    if text[box.end() : box.end() + 1] == "{":
        end = closing_brace(text, box.end())
        return ("", None) if end is None else (text[box.end() + 1 : end].strip(), end + 1)
    bare = _BARE.match(text, box.end()) if box["bare"] else None
    return bare[0].strip().rstrip(".") if bare else "", None


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the brace at ``start``, or None. ``\{`` and ``\}`` do not count."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return match.start()
    return None
