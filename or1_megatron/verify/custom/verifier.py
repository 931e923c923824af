"""A user's own verifier: named in the configuration, kept in a process of its own, and never trusted to return.

``verify.custom`` maps an ability to ``package.module:name``, or to an entry point of group ``or1_megatron.verifiers``.
What is named is a class (made without arguments) with the methods of ``interfaces.Verifier``, of which ``verify``
alone is required, or a function of (problem, response, truncated). Either returns a Verdict, or just the reward:
0, 1 or a bool. Truncated responses are refused before it is asked, as everywhere (RECIPE section 3).
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import or1_megatron
from or1_megatron.errors import Or1Error, UserError
from or1_megatron.types import Problem, Verdict

ENTRY_POINTS = "or1_megatron.verifiers"

_PACKAGE_PARENT = Path(or1_megatron.__file__).resolve().parent.parent
_START_TIMEOUT_S = 120.0


class VerifierBroken(UserError, ValueError):
    """A user's verifier cannot be used; the message names it and says why."""


class _NoAnswer(Or1Error):
    """The child gave none; ``late`` when it would have needed more time, else it died."""

    def __init__(self, words: str, late: bool) -> None:
        super().__init__(words)
        self.late = late


class CustomVerifier:
    """``interfaces.Verifier`` over a child process with a time limit per verdict; a child that exceeds it, or dies,
    is replaced. Raises VerifierBroken at construction when what ``path`` names cannot be loaded."""

    def __init__(self, ability: str, path: str, timeout_s: float) -> None:
        self._name, self._path, self._timeout_s = f"verify.custom.{ability}: '{path}'", path, timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        with self._lock:
            self._start()

    def start(self) -> None:
        """Nothing is left to do: the child runs already."""

    def check_ground_truth(self, problem: Problem) -> None:
        """Raises ValueError with what the verifier says against it."""
        try:
            reply = self._ask({"operation": "check", "problem": dataclasses.asdict(problem)})
        except _NoAnswer as error:
            raise VerifierBroken(f"{self._name}: check_ground_truth: {error}") from None
        if "raised" in reply:
            raise ValueError(f"{self._name}: {reply['raised']}")

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Status ``timeout`` for a verifier that did not answer in time, ``error`` for one that raised or died."""
        started_s = time.perf_counter()
        if truncated:
            return Verdict(0.0, "truncated", "", "cut off at the response-length limit", 0.0)
        request = {"operation": "verify", "problem": dataclasses.asdict(problem), "response": response}
        try:
            reply = self._ask(request)
        except _NoAnswer as error:
            status: Any = "timeout" if error.late else "error"
            return Verdict(0.0, status, "", f"{self._name}: {error}", time.perf_counter() - started_s)
        wall_s = time.perf_counter() - started_s
        if "raised" in reply:
            return Verdict(0.0, "error", "", f"{self._name}: {reply['raised']}", wall_s)
        return Verdict(reply["reward"], reply["status"], reply["answer"], reply["detail"], wall_s)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            self._stop()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._child is None:
                self._start()
            assert self._child is not None and self._child.stdin is not None
            try:
                self._child.stdin.write(json.dumps(request).encode() + b"\n")
                self._child.stdin.flush()
                return self._reply(self._timeout_s)
            except (_NoAnswer, BrokenPipeError) as error:
                ending = self._stop()
                if isinstance(error, _NoAnswer) and error.late:
                    raise
                raise _NoAnswer(f"its process died: {ending}", late=False) from None

    def _start(self) -> None:
        """Raises VerifierBroken."""
        self._buffer = b""
        places = [str(_PACKAGE_PARENT), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "or1_megatron.verify.custom.worker", self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": "1"},
        )
        try:
            reply = self._reply(_START_TIMEOUT_S)
        except _NoAnswer as error:
            reply = {"raised": f"{error}; {self._stop()}"}
        if "raised" in reply:
            self._stop()
            raise VerifierBroken(f"{self._name}: {reply['raised']}")

    def _stop(self) -> str:
        child, self._child, self._buffer = self._child, None, b""
        if child is None:
            return "not running"
        ending = "killed" if child.poll() is None else f"exit status {child.returncode}"
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # an unsent request flushed into a dead child
                pass
        return ending

    def _reply(self, limit_s: float) -> dict[str, Any]:
        assert self._child is not None and self._child.stdout is not None
        deadline_s = time.monotonic() + limit_s
        descriptor = self._child.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
                raise _NoAnswer(f"no verdict within {limit_s:g} s", late=True)
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise _NoAnswer("it ended", late=False)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply
