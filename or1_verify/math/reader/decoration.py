r"""Removes what has no meaning around an answer: environments of one row, leading arrows, proof signs, emphasis.

It also marks the words of languages that write no spaces, and turns typed operators (``x**2``, ``C(n, 2)``) into LaTeX.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from or1_verify.math.reader.words import SPOKEN, WITHOUT_SPACES, YES_NO

_ENVIRONMENT = re.compile(
    r"^\s*\\begin\s*\{(aligned|align|gathered|gather|equation|split|array)(\*?)\}((?:(?!\\\\|\\begin|\\end).)*)"
    r"\\end\s*\{\1\2\}\s*$",
    re.DOTALL,
)
_WRAPPED = re.compile(
    r"^\s*(?:(?:\\(?:Rightarrow|Longrightarrow|implies|therefore)(?![A-Za-z])|∴)(?P<claimed>.+)"
    r"|(?P<proved>.+)(?:\\(?:blacksquare|square|Box|checkmark|qed)|[■▪✓✔✅∎])"
    r"|\\\[(?P<shown>.+)\\\]|(?P<mark>\*\*|__|`)(?P<marked>.+)(?P=mark))\s*$",
    re.DOTALL,
)
_REMARK = re.compile(
    r"(?<=[\d}])\s*\\?[,; ]?\s*(?:\\text\w*\s*\{\s*)?\(\s*(?:\\text\w*\s*\{\s*)?"
    r"((?:[A-Za-z]{2,}\s+)*(?:[A-Za-z]{2,}|«[^»]*»))\s*\}?\s*\)\s*\}?\s*$"
)
_TYPED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\*\*\s*\(([^()]*)\)", r"^{\1}"),
    (r"\*\*\s*(-?\w+(?:\.\d+)?)", r"^{\1}"),
    (r"!=", r"\\ne "),
    (r"\\notin\s*\\\{([^{}]*)\\\}", r"\\ne \1"),
    (r"\^?\s*\\degree(?![A-Za-z])", r"^\\circ "),
    (r"(?<=[)\]}])\s*(?:\\text\s*\{)?\s*(?:U|union)\s*\}?\s*(?=\\?[(\[{])", r"\\cup "),
    (r"(?<![\\A-Za-z])log(2|10)(?=\()", r"\\log_{\1}"),
    (r"(?<![\\A-Za-z])(?:C|binom|comb)\(\s*([a-z0-9]+)\s*,\s*(\d+)\s*\)", lambda match: _chosen(match)),
)


def undecorated(raw: str, typed: bool) -> str:
    """Return the text without decoration, with typed operators in LaTeX. ``typed``: the text has no LaTeX macro."""
    text = raw
    while environment := _ENVIRONMENT.match(text):
        body = environment[3].replace(r"\&", "\0").replace("&", "").replace("\0", r"\&")
        text = re.sub(r"^\s*\{[lcr|]*\}", "", body) if environment[1] == "array" else body
    while wrapped := _WRAPPED.match(text):
        text = wrapped["claimed"] or wrapped["proved"] or wrapped["shown"] or wrapped["marked"]
    if not text.isascii():
        whole = re.sub(r"\\text\s*\{|[{}\s.]", "", text)
        text = YES_NO.get(whole) or WITHOUT_SPACES.sub(lambda match: f" «{SPOKEN.get(match[0], match[0])}» ", text)
    text = _REMARK.sub(r" \\text{\1}", text)
    for pattern, written in _TYPED:
        text = re.sub(pattern, written, text)
    return re.sub(r"\^\s*(\d{2,})(?![\d.])", r"^{\1}", text) if typed else text


def _chosen(match: re.Match[str]) -> str:
    """Return ``C(n, 2)`` as a binomial coefficient. ``C(2, 3)`` stays as it is, because it is a point named C."""
    point = match[1].isdigit() and int(match[1]) < int(match[2])
    return match[0] if point else rf"\binom{{{match[1]}}}{{{match[2]}}}"
