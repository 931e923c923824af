"""Runs a problem's tests against a submission in sandboxes, and yields the outcome of each test.

One sandbox holds the submission and a test's input; a test program or a checker has another. Expected outputs stay in
this process, which compares them. A call's answer counts only if it repeats the nonce that came with the call, so
anything that a submission writes before a call or out of turn is ignored.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from or1_verify.child_process import describe_exit
from or1_verify.code.checker_programs import CheckerPrograms
from or1_verify.code.checkers import text_matches, value_matches
from or1_verify.code.code_tests import CallTest, CodeTest, CodeTests, ProgramTest, StdinTest
from or1_verify.code.codec import encode
from or1_verify.code.in_sandbox import own_program
from or1_verify.code.missing_imports import with_imports
from or1_verify.sandbox.confined_process import ConfinedProcess
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxFailure, SessionEnded
from or1_verify.sandbox.sandbox import Sandbox

_CALL_SERVER = own_program("call_server")
_PROGRAM_RUNNER = own_program("program_runner")
_SHOWN_CHARS = 80
_OUT_OF_TURN = "wrote to the channel out of turn"


TestOutcome = tuple[str, str | None]
"""(name of the test, the reason why the submission failed the test, or None if it passed)."""


class CodeRun:
    """Runs the tests of submissions in ``sandbox``, each test under the sandbox's limits or those of the problem.

    ``budget_s``: wall time limit of all tests of one submission together.
    """

    def __init__(self, sandbox: Sandbox, checkers: CheckerPrograms, budget_s: float) -> None:
        self._sandbox = sandbox
        self._checkers = checkers
        self._budget_s = budget_s

    def outcomes(self, tests: CodeTests, source: str) -> Iterator[TestOutcome]:
        """Run test after test, and yield each outcome. A caller that stops iterating stops the run.

        Raises SandboxFailure if a sandbox fails, CheckerFailed if a checker fails. Neither is the submission's fault.
        """
        deadline_s = time.monotonic() + self._budget_s
        source = with_imports(source, tests.prefix)
        limits = self._sandbox.limits.for_problem(tests.limits)
        calls = _Calls(self._sandbox, tests, source, limits)
        try:
            for test in tests.tests:
                if time.monotonic() > deadline_s:
                    yield test.name, f"all tests together took more than {self._budget_s:.0f} s"
                    return
                yield test.name, self._failure(test, tests, source, calls, limits)
        finally:
            calls.close()

    def _failure(
        self, test: CodeTest, tests: CodeTests, source: str, calls: _Calls, limits: SandboxLimits
    ) -> str | None:
        if isinstance(test, StdinTest):
            return self._stdin(test, tests, source, limits)
        if isinstance(test, CallTest):
            return self._call(test, tests, calls)
        return self._program(test, tests, source, limits)

    def _stdin(self, test: StdinTest, tests: CodeTests, source: str, limits: SandboxLimits) -> str | None:
        program = Program({"main.py": source.encode()}, ("{python}", "{box}/main.py"))
        result = self._sandbox.run(program, test.stdin, limits)
        if result.failure:
            return result.failure
        if tests.checker.is_program:
            right = self._checkers.accepts(
                tests.checker, test.stdin.decode("utf-8", "replace"), result.output, test.expected
            )
        else:
            right = text_matches(result.output, test.expected, tests.checker)
        output = result.output[:_SHOWN_CHARS].decode("utf-8", "replace")
        return None if right else f"wrong output: {_shown(output)}, expected {_shown(test.expected)}"

    def _call(self, test: CallTest, tests: CodeTests, calls: _Calls) -> str | None:
        try:
            answer = calls.ask(test.request())
        except SessionEnded as error:
            return str(error)
        if "raised" in answer:
            return f"raised {answer['raised']}"[:200]
        if "died" in answer:
            return calls.describe_death(answer)
        value = answer["value"]
        if tests.checker.is_program:
            right = self._checkers.accepts(tests.checker, test.arguments, value, test.expected)
        else:
            wanted = [test.expected, *(test.expected if test.wrapped else ())]
            right = any(value_matches(value, one, tests.checker) for one in wanted)
        return None if right else f"wrong result: {_shown(value)}, expected {_shown(test.expected)}"

    def _program(self, test: ProgramTest, tests: CodeTests, source: str, limits: SandboxLimits) -> str | None:
        """Run a test program in one sandbox and the submission in another. Return why the test failed, or None.

        This method carries calls and answers between them. Each call has the wall time limit of a test; all calls
        together have ``budget_s`` as CPU time.
        """
        limits = limits.for_test_program(self._budget_s)
        judge = self._sandbox.open(_PROGRAM_RUNNER, limits)
        calls = _Calls(self._sandbox, tests, source, limits, for_program=True)
        setup = {"prefix": tests.prefix, "program": test.program, "stand_ins": test.stand_ins}
        line, asked = json.dumps(setup).encode(), 0
        deadline_s = time.monotonic() + self._budget_s
        try:
            calls.load()
            while time.monotonic() < deadline_s:
                message = _object(_from_program(judge, line, asked))
                if "ask" not in message:
                    break
                asked += 1
                line = _passed_on(calls.ask(message["ask"]))
            else:
                return f"the test program took more than {self._budget_s:.0f} s"
        except SessionEnded as error:
            return str(error)
        finally:
            judge.close()
            calls.close()
        if "passed" in message:
            return None if asked else "the test program never called the submission"
        return f"{message['failed']}: {message['at']}"


class _Calls:
    """Makes calls of a submission, which is loaded in a sandbox at the first call.

    Each call runs in a fork of the loaded submission, or in a new sandbox if processes cannot fork there.
    ``for_program``: the calls come from a test program, so one process runs them all and keeps the objects they return.
    """

    def __init__(
        self, sandbox: Sandbox, tests: CodeTests, source: str, limits: SandboxLimits, for_program: bool = False
    ) -> None:
        self._sandbox, self._tests, self._source = sandbox, tests, source
        self._limits, self._for_program = limits, for_program
        self._forks = False  # until the call server says that it can
        self._session: ConfinedProcess | None = None

    def load(self) -> None:
        """Load the submission in a new sandbox. Raises SessionEnded if it does not load."""
        self._session = self._sandbox.open(_CALL_SERVER, self._limits)
        setup = {
            "prefix": self._tests.prefix,
            "source": self._source,
            "starter": self._tests.starter,
            "fork": not self._for_program,
        }
        answer = self._exchange(setup)
        if "raised" in answer:
            raise SessionEnded(f"did not load: {answer['raised']}")
        self._forks = bool(answer.get("forks"))

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make a call, and return its answer: {value}, {raised, type} or {died, cpu_s}.

        Raises SessionEnded if no valid answer comes; the next call then gets a new sandbox.
        """
        if self._session is None:
            self.load()
        try:
            answer = self._exchange(request)
        except SessionEnded:
            self.close()
            raise
        if not self._for_program and not self._forks:  # no forks here: the next call gets a sandbox of its own
            self.close()
        return answer

    def describe_death(self, answer: Mapping[str, Any]) -> str:
        """Return in words why a call's fork died, from its answer {died, cpu_s}."""
        assert self._session is not None
        code = answer["died"]
        words = self._session.describe_death(128 - code if code < 0 else code, answer["cpu_s"])
        return words if words.startswith("killed") else f"ended without an answer: {words or describe_exit(0)}"

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _exchange(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._session is not None
        nonce = secrets.token_hex(8)
        line = f"{nonce} {json.dumps(message)}".encode()
        answer = _object(self._session.ask(line))
        kinds = {"raised": str, "type": str, "died": int, "cpu_s": int | float}
        sound = all(isinstance(answer[name], kind) for name, kind in kinds.items() if name in answer)
        forms = [{"value"}, {"raised", "type"}, *([{"died", "cpu_s"}] if self._forks else [])]
        if answer.get("nonce") != nonce or not sound or not any(form <= answer.keys() for form in forms):
            raise SessionEnded(_OUT_OF_TURN)
        return answer


def _from_program(judge: ConfinedProcess, line: bytes, asked: int) -> bytes:
    """Return a test program's next line. If none comes: SandboxFailure before the first call, SessionEnded later."""
    try:
        return judge.ask(line)
    except SessionEnded as error:
        if asked:
            raise SessionEnded(f"the test program did not finish: {error}") from None
        raise SandboxFailure(f"the test program did not start: {error}") from None


def _passed_on(answer: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(answer).encode()
    except RecursionError:
        raise SessionEnded("a result nested too deeply to be passed on") from None


def _object(line: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a line from a possibly hostile program. Raises SessionEnded if there is none."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SessionEnded(f"an answer that cannot be read: {type(error).__name__}") from None
    if not isinstance(answer, dict):
        raise SessionEnded(_OUT_OF_TURN)
    return answer


def _shown(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=encode)
    except (ValueError, TypeError, RecursionError):
        text = "a value that cannot be shown"
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")
