"""The code verifier: the last fenced Python block of the answer, judged by all tests of the problem.

What is hostile-proof: expected outputs never enter the process that runs the submission, so nothing in there (stack
frames, files, patched comparisons, ``__eq__``, exit codes, forged output) can earn a reward except by being right;
the same holds for asserts, which are split into a call inside and a literal outside (``verify.code_tests``). What is
not: a submission may recognise a test's *input* and answer from memory, as any program may.
"""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path

from or1_megatron.types import Problem, Verdict, VerdictStatus
from or1_megatron.verify.answer import after_reasoning
from or1_megatron.verify.code_tests import CodeTest, CodeTests, parse_code_tests
from or1_megatron.verify.compare import output_matches
from or1_megatron.verify.program import Program, SandboxLimits, describe_exit
from or1_megatron.verify.sandbox import Sandbox

_HARNESS = Path(__file__).with_name("code_harness.py")
_MAX_SOURCE_CHARS = 200_000
_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n`]*$", re.MULTILINE)
_PYTHON_LABELS = frozenset({"python", "python3", "py", "Python"})


class CodeVerifier:
    """``interfaces.Verifier`` for ability "code".

    ``timeout_s`` limits each test; a submission that exceeds it is wrong (too slow), not a failure of the verifier.
    Raises SandboxUnavailable at construction when no sandbox can be had.
    """

    def __init__(self, timeout_s: float = 5.0, limits: SandboxLimits | None = None) -> None:
        self._sandbox = Sandbox(limits or SandboxLimits(cpu_s=timeout_s, wall_s=2 * timeout_s))
        self._tests: tuple[str, CodeTests] | None = None

    def check_ground_truth(self, problem: Problem) -> None:
        """Raises ValueError when the ground truth holds no tests that can be run."""
        parse_code_tests(problem.ground_truth)

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Reward 1 when every test passes; the first that fails ends it and is named in ``detail``."""
        started_s = time.perf_counter()

        def verdict(status: VerdictStatus, answer: str, detail: str) -> Verdict:
            reward = 1.0 if status == "right" else 0.0
            return Verdict(reward, status, answer, detail, time.perf_counter() - started_s)

        if truncated:
            return verdict("truncated", "", "cut off at the response-length limit")
        text = after_reasoning(response)
        if text is None:
            return verdict("no_answer", "", "the reasoning is never closed by </think>")
        source = last_python_block(text)
        if source is None:
            return verdict("no_answer", "", "no closed ```python block follows </think>")
        broken = _syntax_error(source)
        if broken:
            return verdict("wrong", source, broken)
        try:
            failure = self._first_failure(self._tests_of(problem), source)
        except OSError as error:  # no process, memory or descriptor for a sandbox: says nothing of the submission
            return verdict("error", source, f"the sandbox did not start: {error}")
        if failure is None:
            return verdict("right", source, "all tests passed")
        return verdict("wrong", source, failure)

    def close(self) -> None:
        """Nothing stays between two verdicts."""

    def _tests_of(self, problem: Problem) -> CodeTests:
        if self._tests is None or self._tests[0] != problem.ground_truth:
            self._tests = (problem.ground_truth, parse_code_tests(problem.ground_truth))
        return self._tests[1]

    def _first_failure(self, tests: CodeTests, source: str) -> str | None:
        for test in tests.tests:
            failure = self._failure(test, tests.prefix + source)
            if failure:
                return f"{test.name}: {failure}"
        return None

    def _failure(self, test: CodeTest, source: str) -> str:
        """Why the submission fails this test; "" when it passes."""
        files = {
            "harness.py": _HARNESS.read_bytes(),
            "submission.py": source.encode("utf-8", "surrogatepass"),
            "request.json": json.dumps(test.request).encode(),
        }
        program = Program(files, ("{python}", "{box}/harness.py", "{box}/submission.py", "{box}/request.json"))
        result = self._sandbox.run(program, test.stdin)
        if result.ending in ("wall_time", "cpu_time"):
            return f"not done within {self._sandbox.limits.cpu_s} s"
        if result.ending == "memory":
            return f"more than {self._sandbox.limits.memory_bytes} bytes of memory"
        if result.ending == "output":
            return f"more than {self._sandbox.limits.output_bytes} bytes of output"
        if result.exit_status != 0:
            last_line = (result.errors.strip().splitlines() or [""])[-1][:200]
            return f"{describe_exit(result.exit_status)}: {last_line}"
        return "" if output_matches(result.output, test.expected, test.comparison) else "wrong output"


def last_python_block(text: str) -> str | None:
    """The source in the last fenced block labelled Python, or, when no block is, in the last without a label.

    None when there is no such block, or the last one never closes.
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
    """Why the source cannot be Python; "" when it parses."""
    if len(source) > _MAX_SOURCE_CHARS:
        return f"{len(source)} characters of source, more than {_MAX_SOURCE_CHARS}"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"does not parse: {type(error).__name__}: {error}"
    return ""
