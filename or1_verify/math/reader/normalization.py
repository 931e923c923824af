r"""Normalizes LaTeX and Unicode, so that all ways to write a thing become one spelling; splits text into tokens.

``clean`` removes only what carries no meaning: styles, spacing, dollar signs, ``\left``. A sign inside a text macro
stays a sign. Words inside text macros are put between « and », so that the unit of ``5 \text{ cm}`` is not taken for
the product of c and m.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from or1_verify.answer import closing_brace
from or1_verify.errors import Or1Error
from or1_verify.math.reader.decoration import undecorated
from or1_verify.math.reader.words import KNOWN_WORDS, SPOKEN, WORDS


class Unreadable(Or1Error):
    """A text is in no known notation. Whether the answer is right is then unknown."""


_LATEX = WORDS["latex"]
_UNICODE = {
    **{sign: rf"\{name} " for sign, name in map(str.split, _LATEX["signs"].split(";"))},
    **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕ", "RZN", strict=True)},
    **{sign: rf"\frac{{1}}{{{under}}}" for sign, under in zip("½⅓¼", "234", strict=True)},
    "⅔": r"\frac{2}{3}",
    "¾": r"\frac{3}{4}",
    "°": r"^\circ ",
    **{sign: rf"\{letter}" for sign, letter in zip("\a\b\f\v", "abfv", strict=True)},  # \frac in JSON, unescaped
    "。": ".",
    "∶": ":",
    "％": "%",
    **dict.fromkeys("−–—‐‑﹣", "-"),
    **dict.fromkeys("′’", "'"),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("，、", ","),
    **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060“”", ""),
    **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\t\n\r", " "),
    **{sign: f"_{{{digit}}}" for digit, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if code not in (0xFF0C, 0xFF05)},
}
_TRANSLATION = str.maketrans(_UNICODE)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_TEXT_MACROS = frozenset(_LATEX["text"].split())
_STYLE_MACROS = frozenset(_LATEX["style"].split())
_UNITS_OF_RATE = re.compile(r"\s*\{\s*[A-Za-z]{1,3}\s*/\s*[A-Za-z]{1,3}(?:\s*\^\s*\{?\d\}?)?\s*\}")
_MACRO = re.compile(r"\\([A-Za-z]+)(?:(?<=operatorname)\*)?")
_SPELLINGS = {name: spelling for spelling, *names in map(str.split, _LATEX["same"].split(";")) for name in names}
"""Spelling of a macro -> the spelling that replaces it."""
_SPACE = re.compile(r"\\[ ,;:!>]|~")
_GROUPED = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:\{,\}|,\\[!,;:] ?|\\[,;:!]| |\\ |,)\d{3})+)(?![\d])")
_BRACED_SYSTEM = re.compile(
    r"\\left\s*\\\{\s*\\begin\s*\{(?P<name>array|aligned)\}(?:\{[lcr| ]*\})?(?P<rows>.*?)"
    r"\\end\s*\{(?P=name)\}\s*\\right\s*\.",
    re.DOTALL,
)
_NOT_GROUPING = re.compile(r"\D")


def clean(raw: str, commas_group: bool = True) -> str:
    """Return ``raw`` in one spelling. With ``commas_group``, ``1,234`` is one number; otherwise it is two.

    Raises Unreadable if braces do not balance, or if parts are struck out or invisible.
    """
    text = raw
    if not raw.isascii():
        text = re.sub(r"⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
        text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
        text = re.sub("[①-⑳]{2,}", lambda match: ",".join(str(ord(sign) - ord("①") + 1) for sign in match[0]), text)
    text = text if "begin" in raw else re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # escaped twice
    text = re.sub(
        r"<su(?:p>(.*?)</sup|b>(.*?)</sub)>", lambda m: f"^{{{m[1]}}}" if m[1] is not None else f"_{{{m[2]}}}", text
    )
    text = undecorated(text.translate(_TRANSLATION), typed="\\" not in raw)
    text = text.replace(r"\$", "¤").replace("$", "").replace(r"\(", "").replace(r"\)", "").replace(r"\%", "%")
    text = text.replace("&nbsp;", " ").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = _GROUPED.sub(lambda match: _ungrouped(match, commas_group), text)
    text = re.sub(r"\\$", "", text)  # a control space whose space was trimmed
    text = _BRACED_SYSTEM.sub(r"\\begin{cases}\g<rows>\\end{cases}", text)
    text = text.replace("{,}", ",").replace("{:}", ":").replace(r"\left.", "").replace(r"\right.", "")
    text = re.sub(r"\\(?:text)?color\s*\{[a-z]+\}|\\color\s*[a-z]+(?=\d)", " ", text)
    text = re.sub(r"\\\\(?:\[\d+\w+\])?", "\x00", text)  # row breaks, before spacing macros are looked for
    text = _SPACE.sub(" ", re.sub(r"(^|=)\s*~", r"\1\\approx ", text))
    text = _macros(text, 0).replace("\x00", r"\\")
    for pattern, written in _PHRASES:
        text = re.sub(pattern, written, text)
    return text


def _family(match: re.Match[str]) -> str:
    """Write ``x \\in \\{k\\pi \\mid k \\in Z\\}`` as ``x = k\\pi, k \\in Z``."""
    name = f"{match[1]} = " if match[1] else ""
    return rf"{name}{match[2]}, {match[3]} \in \mathbb{{{match[4]}}}"


def _of_all(match: re.Match[str]) -> str:
    """Write "all real numbers less than 0" as an interval, "all reals but 0" as a difference, "all x > 0" as x > 0."""
    if match["but"]:
        return rf"\mathbb{{R}} \setminus \{{{re.sub('x *=', '', match['rest'])}\}}"
    if match["less"]:
        return rf"(-\infty , {match['rest']}{']' if match['equal'] else ')'}"
    return rf"{'[' if match['equal'] else '('}{match['rest']}, \infty )" if match["more"] else match["rest"]


def _arc(match: re.Match[str]) -> str:
    seconds = f" {match[3]} «arcseconds»" if match[3] else ""
    return f"{match[1]} «degrees» {match[2]} «arcminutes»{seconds}"


def _cardinal(match: re.Match[str]) -> str:
    """Return the number of an ordinal, 12 for ``12^{th}``. If the suffix is wrong (``12^{st}``), return the text."""
    number = int(match[1])
    own = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    braced = "{" in match[0], bool(match["close"])
    return match[1] if match["suffix"] == own and braced[0] == braced[1] else match[0]


_DEGREES = r"(\d+)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|«degrees?»)"
_PHRASES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        _DEGREES + r"\s*(?:«and»\s*)?(\d+)\s*(?:'|\^\s*\{?\s*'\s*\}?|«(?:arc)?minutes?»)(?!\s*')"
        r"(?:\s*(?:«and»\s*)?(\d+)\s*(?:'\s*'|\^\s*\{?\s*'\s*'\s*\}?|«(?:arc)?seconds?»))?",
        _arc,
    ),
    (r"(\d+)\s*(?:\^\s*(?:\{\s*)?)?«?(?P<suffix>st|nd|rd|th)»?(?P<close>\s*\})?(?![A-Za-z])", _cardinal),
    (
        r"\\cup\s*_\s*\{\s*([a-z])\s*(?:=\s*-\s*\\infty\s*\}\s*\^\s*\{?\s*\+?\s*\\infty\s*\}?"
        r"|\\in\s*\\mathbb\s*\{\s*Z\s*\}\s*\})(.+)$",
        r"\2, \1 \\in \\mathbb{Z}",
    ),
    (
        r"«(positive|natural|negative|nonzero|non-\w+|nonnegative|odd|even)» *«integers?»(?= *[a-z] *$)",
        r"«\1-integer»",
    ),
    (
        r"[,;(]?\s*(?:«?\b(?:where|for|with|and|any|all|every|some|an)»?\s*)*"
        r"(?:«integers?»\s*([a-z])(?![a-z])|(?<![A-Za-z\\])([a-z])\s+(?:«?(?:is|are|any|an|being)»?\s+)*«?integers?»?"
        r"|(?<![A-Za-z\\])([a-z])\s*=\s*0\s*(?:,\s*\\pm\s*1\s*,\s*\\pm\s*2\s*(?:,\s*\\pm\s*3\s*)?),\s*"
        r"(?:\\ldots|\.\.\.))\s*\)?\s*$",
        r", \1\2\3 \\in \\mathbb{Z}",
    ),
    (r"\\mathbb\s+([A-Z])(?![A-Za-z])|(?<=\\in)\s+([ZNQR])(?![A-Za-z_^({])", r" \\mathbb {\1\2}"),
    (r"(\\mathbb\s*\{\s*R\s*\}|\\\})\s*-\s*(?=\\\{)", r"\1 \\setminus "),
    (r"(«(?:sq|cu)») *\.", r"\1"),
    (r"\\frac\s*\{\s*(«[^»]*»)\s*\}\s*\{\s*(«[^»]*»(?:\s*\^\s*(?:\d|\{\d\}))?)\s*\}", r"\1/\2"),
    (r"\b([xy])\s*-\s*«intercept»", r"«\1-intercept»"),
    (r"^\s*«?\b[Ee]qual»?\s+«?to»?(?![A-Za-z])", "«equals»"),
    (r"\s+", " "),
    (r"^ | $", ""),
    (r"(?<!\.) ?\.$", ""),
    (
        r"^(?:([a-z]|\\[a-z]+ )\s*\\in\s*)?\\\{((?:[^{}|:=<>]|\{[^{}]*\})+)[|:]\s*([a-z])\s*\\in\s*"
        r"\\mathbb\s*\{\s*([ZN])\s*\}\s*\\\}$",
        _family,
    ),
    (r"\\mathbb\s*\{\s*R\s*\}\s*_\s*\{\s*>\s*0\s*\}", r"(0, \\infty )"),
    (r"\\mathbb\s*\{\s*R\s*\}\s*_\s*\{\s*\\ge\s*0\s*\}", r"[0, \\infty )"),
    (
        r"(?i)^«?(?:all|every|any)»?(?: «?(?:reals?|numbers?|values?|of|such|that|are|is|with|for)»?| x)* "
        r"(?:«?(?:(?P<but>except|but|excluding|other»? «?than)|(?P<less>less)|(?P<more>greater))»?"
        r"(?: «?(?:than|for)»?)?"
        r"(?P<equal> «or» «equal» «to»)? |(?=x *(?:\\ne |\\[lg]e |[<>])))(?P<rest>.+)$",
        _of_all,
    ),
)
"""(Pattern, replacement) pairs that give phrases and signs one spelling, in the order that ``clean`` applies them."""


def _ungrouped(match: re.Match[str], commas_group: bool) -> str:
    whole = match.group(0)
    if not commas_group and "," in whole and "{" not in whole and "\\" not in whole:
        return whole
    separators = set(re.split(r"\d+", whole)) - {""}
    return _NOT_GROUPING.sub("", whole) if len(separators) == 1 else whole


def _macros(text: str, depth: int) -> str:
    """Mark the words of text macros, remove style macros, and give all other macros one spelling."""
    if depth > 20:
        raise Unreadable("nested too deep")
    out, position = [], 0
    while macro := _MACRO.search(text, position):
        out.append(text[position : macro.start()])
        name, position = macro.group(1), macro.end()
        if name in ("cancel", "bcancel", "xcancel", "sout", "phantom", "hphantom", "vphantom", "not"):
            raise Unreadable(f"\\{name}")
        worded = name in _TEXT_MACROS or (name == "mathrm" and _UNITS_OF_RATE.match(text, position))
        if worded and (end := _argument(text, position)):
            content = text[text.index("{", position) + 1 : end]
            out.append(" " + _words(_macros(content, depth + 1)) + " ")
            position = end + 1
        elif name in _STYLE_MACROS:
            end = _argument(text, position)
            if name == "operatorname" and end is not None and (unknown := _OPERATOR.match(text, position)):
                out.append(rf"\operatorname {{{unknown[1]}}}")
                position = end + 1
            elif end is not None and not "".join(out).rstrip().endswith(("^", "_")):  # an exponent needs its braces
                out.append(f" {_macros(text[text.index('{', position) + 1 : end], depth + 1)} ")
                position = end + 1
            else:
                out.append(" ")
        else:
            out.append(_spelled(name))
    return "".join(out) + text[position:]


def _spelled(name: str) -> str:
    other = _SPELLINGS.get(name, name)
    if other in ("{", "}"):
        return "\\" + other
    return f"\\{other} " if other.isalpha() else other


def _argument(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the braced argument at ``start``; None if none begins there."""
    opening = re.compile(r"\s*\{").match(text, start)
    if opening is None:
        return None
    end = closing_brace(text, opening.end() - 1)
    if end is None:
        raise Unreadable("braces do not balance")
    return end


_WORD = re.compile(r"(?<![\\A-Za-z«])[A-Za-zÀ-ӿ](?:[A-Za-zÀ-ӿ'.-]*[A-Za-zÀ-ӿ])(?![A-Za-z»])")


def _words(content: str) -> str:
    """Put « and » around each run of two or more letters, and around units of one letter."""
    content = re.sub(r"\b([ap])\.\s?m\.?(?![a-z])", r"\1m", content)
    content = _WORD.sub(lambda match: f" «{SPOKEN.get(match[0].lower(), match[0])}» ", content)
    return re.sub(r"(?<![\\A-Za-z«])[mgshlLNJWV](?![A-Za-z»])", r" «\g<0>» ", content)  # one-letter units


def plain(cleaned: str) -> str:
    """Return a cleaned text in lower case, without « and », without braces, and with single spaces."""
    text = re.sub(r"(\w[\s«»]+)A\b", r"\1A_", cleaned)  # "Player A": no article
    text = re.sub(r"[«»{}]", " ", text)
    return re.sub(r"\s+", " ", re.sub(r"\s*,\s*", ", ", text)).strip(" .").lower()


Kind = Literal["number", "symbol", "command", "word", "sign", "escape"]


@dataclass(frozen=True, slots=True)
class Token:
    kind: Kind
    text: str
    spaced: bool = False
    """Whether white space stands before the token."""


_TOKEN = re.compile(
    r"«(?P<word>[^»]*)»"
    r"|(?P<repeating>\d*\.\d*(?:\\overline\s*\{\d+\}|\\dot\s*\{?\d\}?))"
    r"|(?P<elided>\d*\.\d*?(?P<block>\d{1,6}?)(?P=block){2,}\s*(?:\\ldots\b|\.\.\.))"
    r"|(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\w]))?)"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<escape>\\[{}|\\])"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<dots>\.\.\.)"
    r"|(?P<sign>[-+*/^_!'|()\[\]{}<>=:,;%&¤€£¥])",
    re.ASCII,  # digits of other scripts are not digits here
)
FUNCTION_FAMILIES = (
    frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan"}),
    frozenset({"sinh", "cosh", "tanh"}),
    frozenset({"ln", "log", "lg"}),
    frozenset({"gcd", "lcm", "max", "min", "det", "exp"}),
    frozenset({"abs", "floor", "ceil", "cbrt"}),
)
FUNCTIONS: frozenset[str] = frozenset().union(*FUNCTION_FAMILIES)
_NAMES = {name: name for name in (*FUNCTIONS, *_LATEX["typed"].split())}
_OPERATOR = re.compile(rf"\s*\{{\s*(?!(?i:{'|'.join(KNOWN_WORDS | {*_NAMES})})\s*\}})([A-Za-z]{{2,}})\s*\}}")
_NAMES |= {run: name for name, *runs in map(str.split, _LATEX["typed_as"].split(";")) for run in runs}
"""Run of letters typed without a backslash -> the macro that it means."""


def tokens(cleaned: str) -> list[Token]:
    """Split a cleaned text into tokens. Raises Unreadable at an unknown character, such as a Cyrillic letter or ?."""
    tokens: list[Token] = []
    position, spaced = 0, False
    while position < len(cleaned):
        if cleaned[position] == " ":
            position, spaced = position + 1, True
            continue
        match = _TOKEN.match(cleaned, position)
        if match is None:
            raise Unreadable(f"unknown character {cleaned[position]!r}")
        tokens += _of_match(match, spaced)
        position, spaced = match.end(), False
    return tokens


def _of_match(match: re.Match[str], spaced: bool) -> list[Token]:
    kind, text = match.lastgroup or "", match.group(0)
    if match["word"] is not None:
        word = match["word"].strip().lower()
        if word in FUNCTIONS | {"mod"} and word not in ("max", "min"):
            return [Token("command", word, spaced)]
        return [Token("word", word, spaced)]
    if match["repeating"] or match["elided"]:
        return [Token("number", text, spaced)]
    if kind == "letters":
        return _letters(text, spaced)
    if kind == "dots":
        return [Token("command", "ldots", spaced)]
    if kind == "command":
        return [Token("command", match["command"], spaced)]
    return [Token(kind, text, spaced)]  # type: ignore[arg-type]


def _letters(run: str, spaced: bool) -> list[Token]:
    if run in _NAMES:
        return [Token("command", _NAMES[run], spaced)]
    if len(run) > 1 and (run.lower() in KNOWN_WORDS or len(run) > 4):
        return [Token("word", SPOKEN.get(run.lower(), run.lower()), spaced)]
    return [Token("symbol", letter, spaced and index == 0) for index, letter in enumerate(run)]
