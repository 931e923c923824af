"""Finds how many brackets enclose each token, and splits tokens at separators outside all brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from or1_verify.math.reader.normalization import Token, Unreadable

_OPEN = {"(", "[", "{", "\\{", "begin", "lfloor", "lceil", "langle"}
_CLOSE = {")", "]", "}", "\\}", "end", "rfloor", "rceil", "rangle"}


def spelling(items: Sequence[Token]) -> str:
    return "".join(f"\\{token.text} " if token.kind == "command" else token.text for token in items)


def depths(items: Sequence[Token]) -> list[int]:
    """Return for each token how many brackets enclose it. ``[`` may be closed by ``)``, as in an interval."""
    depth, levels = 0, []
    for token in items:
        if token.kind != "word" and token.text in _CLOSE:
            depth -= 1
        levels.append(depth)
        if token.kind != "word" and token.text in _OPEN:
            depth += 1
    if depth != 0:
        raise Unreadable("brackets do not balance")
    return levels


def split(items: Sequence[Token], separates: Callable[[Token], bool]) -> tuple[list[list[Token]], list[str]]:
    """Split tokens at the separators outside all brackets. Return (the parts, the separators)."""
    parts: list[list[Token]] = [[]]
    separators: list[str] = []
    for token, depth in zip(items, depths(items), strict=True):
        if depth == 0 and separates(token):
            parts.append([])
            separators.append(token.text)
        else:
            parts[-1].append(token)
    return parts, separators
