r"""Writes vectors and derivatives of gold and answer in one notation; one text alone does not show what is meant."""

from __future__ import annotations

import re

_PRINTED = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|textbf|bf|vec)(?![A-Za-z])\s*"
    r"(?:\{(?P<inside>\s*(?:\\[A-Za-z]+|[A-Za-z])\s*|[^{}]*\\(?:times|cdot)[^{}]*)\}|(?P<letter>[A-Za-z]))"
)
_NAME = re.compile(
    r"\\(?:text\w*|math[a-z]+|operatorname|overrightarrow|overline|vec|hat|bar|begin|end)\s*\{[^{}]*\}"
    r"|\\[A-Za-z]+|[A-Za-z]"
)
_PRODUCTS = {r"\times", r"\cdot"}
_DEGREE = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
_LEIBNIZ = re.compile(
    rf"\\[dt]?frac\s*\{{\s*d{_DEGREE}\s*([a-zA-Z])\s*\}}\s*\{{\s*d\s*([xt]){_DEGREE}\s*\}}|\bd([a-z])\s*/\s*d([xt])\b"
)
_PRIME = re.compile(r"[a-zA-Z]\s*(?:'|′|\^\s*\{?\s*\\prime)")


def alike(gold: str, answer: str) -> tuple[str, str]:
    """Return (gold, answer), with vectors and derivatives in one notation where the two texts use different ones."""
    return _derivatives(*_vectors(gold, answer))


def _vectors(gold: str, answer: str) -> tuple[str, str]:
    r"""Mark in both texts the letters that either text prints as vectors, if a text has a cross or an arrow.

    ``\mathbf a \times \mathbf b``, ``\vec a \times \vec b`` and ``a \times b`` become equal; ``\cdot`` stays different.
    """
    both = gold + answer
    if not any(sign in both for sign in (r"\times", "×", r"\vec")):
        return gold, answer
    names = {name for match in _PRINTED.finditer(both) for name in _NAME.findall(match["inside"] or match["letter"])}
    return (_marked(gold, names - _PRODUCTS), _marked(answer, names - _PRODUCTS)) if names else (gold, answer)


def _marked(text: str, names: set[str]) -> str:
    bare = _PRINTED.sub(lambda match: f" {match['inside'] or match['letter']} ", text)
    return _NAME.sub(lambda match: rf"\vec{{{match[0]}}}" if match[0] in names else match[0], bare)


def _derivatives(gold: str, answer: str) -> tuple[str, str]:
    r"""Write ``\frac{dy}{dx}`` as ``y'`` if only the other text has primes, and that text has no t (no x for dy/dt)."""
    if _PRIME.search(gold) and not _PRIME.search(answer):
        return gold, _primed(answer, gold)
    if _PRIME.search(answer) and not _PRIME.search(gold):
        return _primed(gold, answer), answer
    return gold, answer


def _primed(text: str, other: str) -> str:
    by = {match[3] or match[6] for match in _LEIBNIZ.finditer(text)}
    letters = set(_NAME.findall(other))
    if by not in ({"x"}, {"t"}) or ("t" if by == {"x"} else "x") in letters:
        return text
    return _LEIBNIZ.sub(_prime, text)


def _prime(match: re.Match[str]) -> str:
    if match[5]:
        return f"{match[5]}'"
    return match[2] + "'" * int(match[1] or 1) if match[1] == match[4] else match[0]
