"""A user's own verifier, which the configuration names. It runs in a process of its own, since it may never return.

``verify.custom`` maps an ability to ``package.module:name``, which names a class (made without arguments) with the
methods of ``types.Verifier``, of which only ``verify`` is required, or a function of (problem, response, truncated).
Class and function return a Verdict, or just the reward: 0, 1 or a bool. Truncated responses are refused before the
verifier is asked, as everywhere (RECIPE section 3).
"""

from __future__ import annotations

import dataclasses
import os
import time

from or1_verify.child_process import ChildDied, ChildLimit, ChildProcess, ChildUnusable
from or1_verify.errors import UserError
from or1_verify.types import Problem, Verdict, Verifier


class VerifierBroken(UserError, ValueError):
    """A user's verifier cannot be used; the message names it and says why."""


class CustomVerifier(Verifier):
    """``types.Verifier`` over a child process, which has ``timeout_s`` for each verdict.

    Raises VerifierBroken at construction when the verifier that ``path`` names cannot be loaded.
    """

    def __init__(self, ability: str, path: str, timeout_s: float) -> None:
        self._name = f"verify.custom.{ability}: '{path}'"
        self._child = ChildProcess("or1_verify.custom_process", path, timeout_s=timeout_s, path=[os.getcwd()])
        try:
            self._child.start(wait=True)
        except ChildUnusable as error:
            raise VerifierBroken(f"{self._name}: cannot be loaded: {error}") from None

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError with the verifier's objection, if it has one."""
        try:
            reply = self._child.ask({"operation": "check", "problem": dataclasses.asdict(problem)})
        except (ChildLimit, ChildDied, ChildUnusable) as error:
            raise VerifierBroken(f"{self._name}: check_ground_truth: {error}") from None
        if "raised" in reply:
            raise ValueError(f"{self._name}: {reply['raised']}")

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Return the user's verdict; ``timeout`` when it is late, ``error`` when the verifier raises or dies."""
        started_s = time.perf_counter()
        if truncated:
            return Verdict(0.0, "truncated", "", "cut off at the response-length limit", 0.0)
        request = {"operation": "verify", "problem": dataclasses.asdict(problem), "response": response}
        try:
            status, answer, detail = self._child.judge(request)
        except ChildUnusable as error:
            raise VerifierBroken(f"{self._name}: {error}") from None
        if status in ("timeout", "error"):
            detail = f"{self._name}: {detail}"
        return Verdict(float(status == "right"), status, answer, detail, time.perf_counter() - started_s)

    def close(self) -> None:
        """End the child."""
        self._child.close()
