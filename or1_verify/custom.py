"""Runs a user's own verifier or reward function (``verify.custom``) in a child process, since it may never return.

``verify.custom`` maps an ability to ``package.module:name`` or ``path/to/file.py:name``. The name may mean

- a class with the methods of ``types.Verifier``, made without arguments; only ``verify`` is required;
- a function of (problem, response, truncated);
- a function of verl's form (docs/custom_verifiers.md).

The method or function returns a number as reward, a mapping with the number as ``score`` or ``reward``, or a Verdict.
Truncated responses get the lowest reward, and the verifier is not called (docs/recipe.md, section 3).
"""

from __future__ import annotations

import dataclasses
import os
import time

from or1_verify.child_process import ChildDied, ChildLimit, ChildProcess, ChildUnusable
from or1_verify.config import VerifyConfig
from or1_verify.errors import UserError
from or1_verify.types import Problem, Verdict, Verifier


class VerifierBroken(UserError, ValueError):
    """A user's own verifier cannot be used; the message names the verifier and says why."""


class CustomVerifier(Verifier):
    """A ``types.Verifier`` that calls the user's verifier in a child process, with ``config.timeout_s`` per verdict.

    Raises VerifierBroken at construction if the user's verifier of ``ability`` cannot be loaded.
    """

    def __init__(self, ability: str, config: VerifyConfig) -> None:
        path, limits = config.custom[ability], (str(config.right_reward), str(config.lowest_reward))
        self._name, self._lowest = f"verify.custom.{ability}: '{path}'", config.lowest_reward
        self._child = ChildProcess(
            "or1_verify.custom_process", path, *limits, timeout_s=config.timeout_s, path=[os.getcwd()]
        )
        try:
            self._child.start(wait=True)
        except ChildUnusable as error:
            raise VerifierBroken(f"{self._name}: cannot be loaded: {error}") from None

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError if the user's verifier objects to the problem's ground truth."""
        try:
            reply = self._child.ask({"operation": "check", "problem": dataclasses.asdict(problem)})
        except (ChildLimit, ChildDied, ChildUnusable) as error:
            raise VerifierBroken(f"{self._name}: check_ground_truth: {error}") from None
        if "raised" in reply:
            raise ValueError(f"{self._name}: {reply['raised']}")

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Return the user's verdict. Its status is ``timeout`` if it is late, ``error`` if the user's code fails."""
        started_s = time.perf_counter()
        if truncated:
            return Verdict(self._lowest, "truncated", "", "cut off at the response-length limit", 0.0)
        request = {"operation": "verify", "problem": dataclasses.asdict(problem), "response": response}
        try:
            reply = self._child.verdict(request)
        except ChildUnusable as error:
            raise VerifierBroken(f"{self._name}: {error}") from None
        fields = {"reward": self._lowest, **reply}
        if fields["status"] in ("timeout", "error"):
            fields["detail"] = f"{self._name}: {problem.origin}: {fields['detail']}"
        return Verdict(**fields, wall_s=time.perf_counter() - started_s)

    def close(self) -> None:
        self._child.close()
