"""Runs checker programs, for problems with several valid outputs: Python functions and testlib checkers in C++.

Checkers come from the data, not from the submission, and still run in a sandbox (docs/code_verifier.md says how they
are called). Checkers get the submission's output as data, after the submission has ended. If a checker meets a limit,
it runs again on the expected output. If it meets a limit there too, the checker has failed; else the submission's
output counts as wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from or1_verify.code.checkers import Checker
from or1_verify.code.codec import encode
from or1_verify.code.in_sandbox import own_program
from or1_verify.errors import Or1Error
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxResult
from or1_verify.sandbox.sandbox import Sandbox

_CHECKER_RUNNER = own_program("checker_runner")
_COMPILE_LIMITS = SandboxLimits(
    cpu_s=60.0, wall_s=180.0, file_bytes=256 << 20, scratch_bytes=512 << 20, output_bytes=64 << 20
)
_COMPILE = "g++ -std=c++17 -O2"
_ACCEPTS, _REFUSES = frozenset({0}), frozenset({1, 2, 7})  # testlib's: wrong, badly formed, partial


class CheckerFailed(Or1Error):
    """A checker program gave no verdict, through no fault of the submission."""

    def __init__(self, words: str, result: SandboxResult | None = None) -> None:
        super().__init__(words if result is None else f"{words}: {result.failure}")
        self.met_a_limit = result is not None and result.ending != "exited"


class CheckerPrograms:
    """Runs the checker programs of problems. ``headers``: a folder of headers for C++ checkers, with testlib.h."""

    def __init__(self, sandbox: Sandbox, headers: Path | None = None, cache: Path | None = None) -> None:
        self._sandbox = sandbox
        self._headers = headers
        self._cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "or1_megatron"
        self._binaries: dict[str, bytes] = {}  # by the hash of the source

    def prepare(self, checker: Checker) -> None:
        """Check before the run that a checker parses or compiles. Raises ValueError if it does not."""
        if checker.kind == "testlib":
            self._binary(checker)
        elif checker.kind == "python":
            try:
                code = compile(checker.parameters["source"], "checker", "exec")
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"checker python: does not parse: {error}") from None
            if "check" not in code.co_names:
                raise ValueError("checker python: expected its source to define check(input, output, answer)")

    def accepts(self, checker: Checker, given: Any, output: Any, expected: Any) -> bool:
        """Return whether the checker accepts an output (bytes, or a call's encoded result). Raises CheckerFailed."""
        try:
            return self._accepts(checker, given, output, expected)
        except CheckerFailed as failed:
            if not failed.met_a_limit:
                raise
        in_its_place = expected.encode() if isinstance(output, bytes) else encode(expected)
        try:
            self._accepts(checker, given, in_its_place, expected)
        except CheckerFailed as failed:
            if failed.met_a_limit:
                raise
        return False  # the checker copes with the expected output in time, so this output is to blame

    def _accepts(self, checker: Checker, given: Any, output: Any, expected: Any) -> bool:
        if checker.kind == "python":
            text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
            try:
                arguments = json.dumps([encode(given), text, encode(expected)])
            except RecursionError:  # of the three only the output can be nested too deeply
                return False
            return self._python(checker.parameters["source"], arguments)
        files = {"checker": self._binary(checker), "input": given, "output": output, "answer": expected}
        program = Program(
            {name: part if isinstance(part, bytes) else part.encode() for name, part in files.items()},
            ("{box}/checker", "{box}/input", "{box}/output", "{box}/answer"),
            executable=frozenset({"checker"}),
        )
        result = self._sandbox.run(program)
        if result.ending == "exited" and result.exit_status in _ACCEPTS | _REFUSES:
            return result.exit_status in _ACCEPTS
        raise CheckerFailed("the testlib checker failed", result)

    def _python(self, source: str, arguments: str) -> bool:
        result = self._sandbox.run(_CHECKER_RUNNER, json.dumps([source, arguments]).encode())
        try:
            answer = json.loads(result.output)
        except ValueError:
            raise CheckerFailed("the python checker gave no answer", result) from None
        if "broken" in answer:
            raise CheckerFailed(f"the python checker is broken: {answer['broken']}")
        return bool(answer["accepted"])

    def _binary(self, checker: Checker) -> bytes:
        source, files = checker.parameters["source"], self._files(checker)
        identity = json.dumps([source, files, _COMPILE, platform.machine()], sort_keys=True)
        name = hashlib.sha256(identity.encode()).hexdigest()
        if name not in self._binaries:
            path = self._cache / "checkers" / name
            if not path.is_file():
                _write(path, self._compile(source, files))
            self._binaries[name] = path.read_bytes()
        return self._binaries[name]

    def _files(self, checker: Checker) -> dict[str, str]:
        files = dict(checker.parameters.get("files", {}))
        if "testlib.h" not in files and "testlib.h" in checker.parameters["source"]:
            header = self._headers / "testlib.h" if self._headers else None
            if header is None or not header.is_file():
                raise ValueError(
                    "checker testlib: its source includes testlib.h; expected it in the checker's 'files', or in the "
                    f"folder that verify.checker_headers names ({self._headers})"
                )
            files["testlib.h"] = header.read_text()
        return files

    def _compile(self, source: str, files: Mapping[str, str]) -> bytes:
        if shutil.which("g++") is None:
            raise ValueError("checker testlib: no g++ on PATH to compile it; install it")
        texts = {**files, "checker.cpp": source}
        program = Program(
            {name: text.encode() for name, text in texts.items()},
            ("/bin/sh", "-c", f"{_COMPILE} -I{{box}} -o checker {{box}}/checker.cpp && cat checker"),
            tool=True,
        )
        result = self._sandbox.run(program, limits=_COMPILE_LIMITS)
        if not result.succeeded:
            raise ValueError(f"checker testlib: does not compile: {result.failure}: {result.errors.strip()[-1000:]}")
        return result.output


def _write(path: Path, content: bytes) -> None:
    """Write a file by renaming a temporary one, because several verifiers may compile the same checker at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_bytes(content)
    aside.replace(path)
