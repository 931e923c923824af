"""The code verifier: judges the last fenced Python block of the answer by all tests of the problem.

Expected outputs, test programs and checkers never enter the process that runs the submission, so nothing in there
(stack frames, files, patched comparisons, ``__eq__``, exit codes, forged output) can earn a reward except by being
right (``code.run_tests``). No verifier can prevent that a submission recognises a test's *input* and answers from
memory.
"""

from __future__ import annotations

import ast
import re
import time
from functools import lru_cache

from or1_verify.answer import after_reasoning
from or1_verify.code.checker_programs import CheckerFailed, CheckerPrograms
from or1_verify.code.ground_truth import parse_code_tests
from or1_verify.code.run_tests import CodeRun, TestOutcome
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.sandbox import Sandbox, open_sandbox
from or1_verify.types import Problem, Verdict, VerdictStatus, Verifier

_MAX_SOURCE_CHARS = 200_000
# Possessive: else a line that does not match is tried at every length, minutes for a million spaces.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([A-Za-z0-9_+-]*+)[^\n`]*+$", re.MULTILINE)
_PYTHON_LABELS = frozenset({"python", "python3", "py", "Python"})


class CodeVerifier(Verifier):
    """``types.Verifier`` for ability "code".

    Runs submissions in ``sandbox``, with its limits, and closes it at the end. None: the sandbox that ``config`` asks
    for. A submission that exceeds a limit is wrong, not an error. Raises SandboxUnavailable at construction when no
    sandbox works.
    """

    def __init__(self, config: VerifyConfig, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or open_sandbox(config)
        self._checkers = CheckerPrograms(self._sandbox, config.checker_headers)
        self._run = CodeRun(self._sandbox, self._checkers, config.budget_s)
        self._early_stop = config.early_stop
        self._tests_of = lru_cache(maxsize=1)(parse_code_tests)  # a group's responses come in a row

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError when the ground truth has no usable tests, or an unusable checker."""
        self._checkers.prepare(parse_code_tests(problem.ground_truth).checker)

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Give reward 1 when every test passes. ``detail`` has each test's result and why the first one failed."""
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
        """Close the sandbox."""
        self._sandbox.close()


def describe(outcomes: list[TestOutcome], tests: int) -> str:
    """Return every test's result (``.`` passed, ``F`` failed, ``-`` not run) and the first failure in words."""
    marks = "".join("." if failure is None else "F" for _, failure in outcomes).ljust(tests, "-")
    failed = next((f"; {name}: {failure}" for name, failure in outcomes if failure is not None), "")
    return f"{marks.count('.')} of {tests} tests passed [{marks}]{failed}"


def printable(text: str) -> str:
    """Spell out characters that a terminal would obey or a file refuse: parts of the text are the submission's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def last_python_block(text: str) -> str | None:
    """Return the source in the last fenced block labelled Python, or, without any, in the last one without a label.

    Returns None when there is no such block, or it never closes.
    """
    blocks: list[tuple[str, str | None]] = []  # (label, source)
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif not fence[1]:  # only a bare fence closes
            blocks.append((opened[1], text[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[1], None))
    for labels in (_PYTHON_LABELS, frozenset({""})):
        for label, source in reversed(blocks):
            if label in labels:
                return source
    return None


def _syntax_error(source: str) -> str:
    """Say why the source is not Python; "" when it parses."""
    if len(source) > _MAX_SOURCE_CHARS:
        return f"{len(source)} characters of source, more than {_MAX_SOURCE_CHARS}"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"does not parse: {type(error).__name__}: {error}"
    return ""
