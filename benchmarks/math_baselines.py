r"""Other rules that judge a boxed answer by a gold, to compare with ours. They were written from their descriptions.

``hendrycks`` is the string normaliser of the MATH benchmark's authors. ``deepscaler`` is the two-step rule of
DeepScaleR's reward: normalised texts equal, or, element by element, equal by sympy, with the guards of its grader.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

Rule = Callable[[str, str], bool]


def hendrycks(gold: str, answer: str) -> bool:
    return normalised(gold) == normalised(answer)


def normalised(text: str) -> str:
    """Remove spacing, styles, units behind a number and percent signs; give fractions and roots one spelling."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = text.split("\\text{ ")[0] if text.count("\\text{ ") == 1 else text
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    if text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2:
        text = text.split("=")[1]
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


_UNITS = [
    "degree",
    "cm",
    "centimeter",
    "meter",
    "mile",
    "second",
    "minute",
    "hour",
    "day",
    "week",
    "month",
    "year",
    "foot",
    "feet",
    "inch",
    "yard",
    "liter",
]


def deepscaler(gold: str, answer: str) -> bool:
    if hendrycks(gold, answer):
        return True
    left, right = _as_sympy_text(gold), _as_sympy_text(answer)
    if not right:
        return False
    if left == right:
        return True
    golds, answers = _elements(left), _elements(right)
    if len(golds) != len(answers) or (len(golds) > 1 and (left[0] != right[0] or left[-1] != right[-1])):
        return False
    return all(_element_equal(ours, theirs) for ours, theirs in zip(golds, answers, strict=True))


def _as_sympy_text(text: str) -> str:
    text = re.sub(r"\\text\{(.*?)\}", r"\1", text).replace("\\%", "%").replace("\\$", "").replace("$", "")
    text = text.replace("%", "").replace(" or ", " , ").replace(" and ", " , ")
    for word, zeros in (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")):
        text = text.replace(word, zeros)
    for unit in _UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ|\^ *\{\\circ\}", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text.replace("\\!", "").replace("{,}", ","))
    text = re.sub(r"\\[dt]?frac", r"\\frac", text.replace("\\left", "").replace("\\right", ""))
    for _ in range(4):
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
    text = re.sub(r"(\d) +\(\(", r"\1+((", text)
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\pi", "pi").replace("\\infty", "oo")
    return re.sub(r"\s", "", text.replace("{", "").replace("}", "").replace("\\", "")).lower()


def _elements(text: str) -> list[str]:
    bracketed = len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not re.search(r"[()\[\]]", text[1:-1])
    return text[1:-1].split(",") if bracketed else [text]


def _element_equal(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    if re.fullmatch(r"\(\(-?\d+\)/\(-?\d+\)\)|-?\d+/\d+", gold) and re.fullmatch(r"[-()\d/]+", answer):
        return False  # fractions must be given reduced
    if re.fullmatch(r"-?\d+", gold) and re.fullmatch(r"-?[\d.]+", answer):
        return False
    for text in (gold, answer):
        letters = set(re.findall("[a-z]", text.replace("sqrt", "").replace("frac", "")))
        if len(letters) > 2 or re.search(r"\^\d+\^|\^\d{3,}|\^\(", text):
            return False
    return _sympy_equal(gold, answer)


def _sympy_equal(gold: str, answer: str) -> bool:
    import sympy
    from sympy.parsing import sympy_parser

    transformations = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )
    with contextlib.suppress(Exception):  # what sympy cannot read is not equal
        difference = f"({gold})-({answer})".replace("^", "**")
        return bool(sympy.simplify(sympy_parser.parse_expr(difference, transformations=transformations)) == 0)
    return False


RULES: dict[str, Rule] = {"Hendrycks": hendrycks, "DeepScaleR": deepscaler}


class Bounded:
    """A rule in a child process. An answer that takes longer than the limit is refused, and the child replaced."""

    def __init__(self, name: str, limit_s: float = 5.0) -> None:
        self.name, self.limit_s = name, limit_s
        self.timeouts = 0
        self._start()

    def _start(self) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._child = multiprocessing.get_context("spawn").Process(target=_serve, args=(self.name, theirs), daemon=True)
        self._child.start()
        theirs.close()
        self._ours.recv()

    def __call__(self, golds: Sequence[str], answer: str) -> tuple[bool, float]:
        """Return (accepted, the child's CPU seconds)."""
        try:
            self._ours.send((tuple(golds), answer))
            if self._ours.poll(self.limit_s):
                accepted, cpu_s = self._ours.recv()
                return bool(accepted), float(cpu_s)
        except (EOFError, BrokenPipeError):
            pass
        self.timeouts += 1
        self.close()
        self._start()
        return False, self.limit_s

    def close(self) -> None:
        self._child.kill()
        self._child.join()
        self._ours.close()


def _serve(name: str, connection: Connection) -> None:
    import logging
    import resource
    import time

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    logging.disable(logging.CRITICAL)
    rule = RULES[name]
    rule("\\frac{1}{2}+x", "x+\\frac{1}{2}")
    connection.send("ready")
    while True:
        golds, answer = connection.recv()
        started_s = time.process_time()
        accepted = False
        with contextlib.suppress(Exception, MemoryError):  # a rule that fails does not accept
            accepted = any(rule(gold, answer) for gold in golds)
        connection.send((accepted, time.process_time() - started_s))
