"""The code verifier: runs the last fenced Python block of a response against all tests of the problem.

Expected outputs, test programs and checkers never enter the process that runs the submission, so no trick in there
(stack frames, files, patched comparisons, ``__eq__``, exit codes, forged output) can earn a reward; only right results
can (``code.run_tests``). No verifier can prevent that a submission recognises a test's *input* and answers from memory.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import time
from functools import lru_cache
from itertools import islice

from or1_verify.answer import after_reasoning
from or1_verify.code.checker_programs import CheckerFailed, CheckerPrograms
from or1_verify.code.code_tests import ProgramTest
from or1_verify.code.ground_truth import parse_code_tests
from or1_verify.code.missing_imports import modules_of
from or1_verify.code.run_tests import CodeRun, TestOutcome
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.sandbox import Sandbox, open_sandbox
from or1_verify.types import Problem, Verdict, VerdictStatus, Verifier

_MAX_SOURCE_CHARS = 200_000
_MOST_SEARCHED_CHARS = 2 * _MAX_SOURCE_CHARS  # in one response, for the ends of its blocks
_MOST_ENDS = 20  # of one block
# Possessive quantifiers: otherwise a line that does not match is tried at every length, minutes for a million spaces.
_OPENING = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)[ \t]*+([A-Za-z0-9_+.-]*+)[^\n`]*+\n", re.MULTILINE)
_CLOSING = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)(?![\w`~])")
_PYTHON = re.compile(r"i?py(thon|py)?[\d.]*", re.IGNORECASE)
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)


class CodeVerifier(Verifier):
    """The ``types.Verifier`` of code problems.

    Runs submissions in ``sandbox``, with its limits; None means a new sandbox as ``config`` describes. ``close`` closes
    the sandbox. A submission that exceeds a limit is wrong, not an error. Raises SandboxUnavailable at construction if
    no sandbox works.
    """

    def __init__(self, config: VerifyConfig, sandbox: Sandbox | None = None) -> None:
        sys.set_int_max_str_digits(0)  # tests and submissions hold longer integers
        self._sandbox = sandbox or open_sandbox(config)
        self._checkers = CheckerPrograms(self._sandbox, config.checker_headers)
        self._run = CodeRun(self._sandbox, self._checkers, config.budget_s)
        self._importable: set[str] = set()  # modules that tests import
        self._early_stop = config.early_stop
        self._tests_of = lru_cache(maxsize=1)(parse_code_tests)  # a group's responses come in a row

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError if the ground truth has no usable tests, or if its tests or checker cannot run here."""
        tests = parse_code_tests(problem.ground_truth)
        self._checkers.prepare(tests.checker)
        programs = [tests.prefix, *(test.program for test in tests.tests if isinstance(test, ProgramTest))]
        if tests.checker.kind == "python":
            programs.append(tests.checker.parameters["source"])
        wanted = {name for source in programs if "import" in source for name in modules_of(source)} - self._importable
        missing = self._sandbox.missing(wanted) if wanted else set()
        self._importable |= wanted - missing
        if missing:
            raise ValueError(
                f"its tests import {', '.join(sorted(missing))}, which the sandbox's Python does not have: every "
                "submission would be wrong. Expected the standard library, numpy or pytest (docs/sandbox.md)"
            )

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Judge a response: reward 1 if every test passes. ``detail``: each test's result, and the first failure."""
        started_s = time.perf_counter()

        def verdict(status: VerdictStatus, answer: str, detail: str) -> Verdict:
            reward = 1.0 if status == "right" else 0.0
            return Verdict(reward, status, answer, printable(detail), time.perf_counter() - started_s)

        if truncated:
            return verdict("truncated", "", "cut off at the response-length limit")
        text = after_reasoning(response)
        if text is None:
            return verdict("no_answer", "", "the reasoning is never closed")
        source = last_python_block(text)
        if source is None:
            return verdict("no_answer", "", "no closed ```python block follows the reasoning")
        broken = _syntax_error(source)
        if broken:
            return verdict("wrong", source, broken)
        tests = self._tests_of(problem.ground_truth)
        outcomes: list[TestOutcome] = []
        try:
            for outcome in self._run.outcomes(tests, source):
                outcomes.append(outcome)
                if self._early_stop and outcome[1] is not None:
                    break
        except OSError as error:  # no process, memory or descriptor for a sandbox: not the submission's fault
            return verdict("error", source, f"the sandbox failed: {error}")
        except CheckerFailed as error:
            return verdict("error", source, str(error))
        right = all(failure is None for _, failure in outcomes) and len(outcomes) == len(tests.tests)
        return verdict("right" if right else "wrong", source, describe(outcomes, len(tests.tests)))

    def close(self) -> None:
        self._sandbox.close()


def describe(outcomes: list[TestOutcome], tests: int) -> str:
    """Return in words each test's result (``.`` passed, ``F`` failed, ``-`` not run), and the first failure."""
    marks = "".join("." if failure is None else "F" for _, failure in outcomes).ljust(tests, "-")
    failed = next((f"; {name}: {failure}" for name, failure in outcomes if failure is not None), "")
    return f"{marks.count('.')} of {tests} tests passed [{marks}]{failed}"


def printable(text: str) -> str:
    """Return text with unprintable characters escaped, because parts of it come from the submission."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def last_python_block(text: str) -> str | None:
    """Return the source in a text's last fenced block labelled Python, or else in its last block without a label.

    A fence is three or more backticks or tildes anywhere in a line: in a list, a quote or a box, or after the last line
    of code. Strings of a program may hold fences too. So a Python block ends at the first fence up to which the source
    parses, or at the very first fence if the source never parses. Fences that begin a line are tried first, because
    comments may hold fences too. Returns None if there is no such block, or if it is never closed.
    """

    def before(fence: re.Match[str]) -> str:
        return text[text.rfind("\n", 0, fence.start()) + 1 : fence.start()]

    blocks: dict[str, str | None] = {}  # the last of each label
    start, left = 0, _MOST_SEARCHED_CHARS
    while opened := _OPENING.search(text, start):
        label = "python" if _PYTHON.fullmatch(opened[2]) else opened[2]
        quoted = _QUOTE.match(before(opened))
        ends = (end for end in _CLOSING.finditer(text, opened.end()) if end[1].startswith(opened[1]))
        blocks[label], start, parses = None, len(text), False
        for end in sorted(islice(ends, _MOST_ENDS), key=lambda end: before(end).strip(" \t>") != ""):
            source = text[opened.end() : end.start()]
            source = textwrap.dedent(_QUOTE.sub("", source) if quoted else source)
            parses = label == "python" and not _syntax_error(source)
            if blocks[label] is None or parses:
                blocks[label], start = source, end.end()
            left -= len(source)
            if parses or label != "python" or left < 0:
                break
        left -= start - opened.end()
        if not parses and left > 0:  # a fence that the text only speaks of, or one around a whole answer
            inner = (each for each in _OPENING.finditer(text, opened.end(), start) if _PYTHON.fullmatch(each[2]))
            start = next((each.start() for each in inner), start)
    return blocks["python"] if "python" in blocks else blocks.get("")


def _syntax_error(source: str) -> str:
    if len(source) > _MAX_SOURCE_CHARS:
        return f"{len(source)} characters of source, more than {_MAX_SOURCE_CHARS}"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"does not parse: {type(error).__name__}: {error}"
    return ""
