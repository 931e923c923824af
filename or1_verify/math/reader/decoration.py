r"""Takes off what surrounds an answer and says nothing: sizes, environments of one row, remarks, frames of a sentence.

It also writes what is typed without LaTeX in LaTeX: ``x**2``, ``!=``, ``infinity``, ``C(n, 2)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_ENVIRONMENT = re.compile(
    r"^\s*\\begin\s*\{(aligned|align|gathered|gather|equation|split|array)(\*?)\}((?:(?!\\\\|\\begin|\\end).)*)"
    r"\\end\s*\{\1\2\}\s*$",
    re.DOTALL,
)
_REMARK = re.compile(r"(?<=[\d}])\s*\\?[,;]?\s*(?:\\text\s*\{\s*)?\(\s*((?:[A-Za-z]{2,}\s*)+)\)\s*\}?\s*$")
_METRES: Mapping[str, str] = {
    "平方厘米": r"\text{ cm}^2", "平方米": r"\text{ m}^2", "立方厘米": r"\text{ cm}^3", "立方米": r"\text{ m}^3",
    "厘米": r"\text{ cm}", "米": r"\text{ m}", "千米": r"\text{ km}", "公里": r"\text{ km}",
}  # fmt: skip
_CHINESE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^(\s*(?:\\text\s*\{)?)\s*(?:最终)?(?:答案|结果)\s*(?:是|为)?\s*[:：]?", r"\1"),
    (r"^(\s*(?:\\text\s*\{)?)\s*[一总]?共有?(?=\s*\}?\s*\d)", r"\1"),
    (r"^\s*(?:\\text\s*\{)?\s*(?:是|对|正确)的?\s*\}?\s*$", r"\\text{Yes}"),
    (r"^\s*(?:\\text\s*\{)?\s*(?:否|不|不是|错误?)\s*\}?\s*$", r"\\text{No}"),
    (r"和|以及", r" \\text{and} "),
    (r"或者?", r" \\text{or} "),
    (r"人民币|元|円", r" \\text{yuan} "),
    (r"(?<=[\d}])(\s*(?:\\text\s*\{)?)\s*[个種种只本人件条枚次张块颗棵头辆页名位支双通り個](\s*\}?\s*)$", r"\1\2"),
    (r"平方厘米|平方米|立方厘米|立方米|厘米|千米|公里|米", lambda match: _METRES[match[0]]),
)
_GREEK = "alpha beta gamma delta theta lambda omega sigma phi psi"
_TYPED = (
    (r"\*\*\s*\(([^()]*)\)", r"^{\1}"),
    (r"\*\*\s*(-?\w+)", r"^{\1}"),
    (r"!=", r"\\ne "),
    (r"(?<![\\A-Za-z])infinity\b", r"\\infty "),
    (r"(?<![\\A-Za-z])C\(\s*([a-z0-9]+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
    (r"(?<![\\A-Za-z])abs\(([^()]*)\)", r"|\1|"),
    (r"(?<![\\A-Za-z])exp\(([^()]*)\)", r"e^{\1}"),
    (r"(?<![\\A-Za-z])floor\(([^()]*)\)", r"\\lfloor \1\\rfloor "),
    (r"(?<![\\A-Za-z])ceil\(([^()]*)\)", r"\\lceil \1\\rceil "),
    (rf"(?<![\\A-Za-z{{])({_GREEK.replace(' ', '|')})(?![A-Za-z])", r"\\\1 "),
    (r"([+-])\s*\+\s*(?=[\d.A-Za-z])", r"\1 "),
    (r"\+\s*-\s*(?=[\d.A-Za-z])", "- "),
    (r"(?<=[\w)}])\s*-\s*-\s*(?=[\d.A-Za-z])", " + "),
)


def undecorated(raw: str) -> str:
    """Return the text without its decoration, typed operators in LaTeX."""
    text = raw
    while environment := _ENVIRONMENT.match(text):
        body = environment[3].replace(r"\&", "\0").replace("&", "").replace("\0", r"\&")
        text = re.sub(r"^\s*\{[lcr|]*\}", "", body) if environment[1] == "array" else body
    for pattern, written in _CHINESE if not text.isascii() else ():
        text = re.sub(pattern, written, text)
    text = _REMARK.sub(r" \\text{\1}", text)
    for pattern, written in _TYPED:
        text = re.sub(pattern, written, text)
    if "\\" not in raw:
        text = re.sub(r"\^\s*(\d{2,})(?![\d.])", r"^{\1}", text)
    return text
