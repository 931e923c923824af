r"""Rule-based verifiers, which judge responses to math and code problems without torch, Ray, engine or trainer.

    from or1_verify import verify

    verify("math", '["12"]', r"... </think> \boxed{12}").status  # "right"

``verify_many`` judges many responses, and ``verify_file`` judges a file of responses. A program that judges again and
again calls ``build_verifiers`` once and keeps the verifiers (README.md).

Modules that take long to import are imported at first use, because the verifiers' child processes import this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from or1_verify.errors import UserError
from or1_verify.types import Attempt, Message, Problem, Verdict, VerdictStatus, Verifier

if TYPE_CHECKING:
    from or1_verify.config import VerifyConfig
    from or1_verify.recorded import verify_file
    from or1_verify.verifiers import build_verifiers

__all__ = [
    "Attempt",
    "Message",
    "Problem",
    "UserError",
    "Verdict",
    "VerdictStatus",
    "Verifier",
    "VerifyConfig",
    "build_verifiers",
    "verify",
    "verify_file",
    "verify_many",
]

_LATE = {"VerifyConfig": "config", "build_verifiers": "verifiers", "verify_file": "recorded"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)


def verify(
    ability: str, ground_truth: str, response: str, truncated: bool = False, config: VerifyConfig | None = None
) -> Verdict:
    """Judge one response. Each call starts the verifier's processes and ends them, which takes about a second.

    Args:
        ability: "math", "code" or a key of ``config.custom``.
        ground_truth: JSON; for math a list of answers, for code an object of tests (docs/code_verifier.md).
        truncated: whether the response was cut off at its length limit.

    Raises:
        ValueError: the ability has no verifier, or the ground truth cannot be used.
        UserError: a custom verifier cannot be loaded, or the ability is "code" and no sandbox works on this machine.
    """
    from or1_verify.config import VerifyConfig
    from or1_verify.verifiers import build_verifiers

    problem = Problem("", "", ability, (), ground_truth, {}, "the problem")
    with closing(build_verifiers(config or VerifyConfig(), {ability})[ability]) as verifier:
        verifier.check_ground_truth(problem)
        return verifier.verify(problem, response, truncated)


def verify_many(attempts: Sequence[Attempt], config: VerifyConfig | None = None) -> Iterator[Verdict]:
    """Yield the verdict on each (problem, response, truncated), in the given order. ``config.workers`` threads judge.

    Raises the errors of ``verify``; an unusable ground truth raises ValueError when the iteration reaches its problem.
    The ``check_ground_truth`` of a custom verifier is not called.
    """
    from or1_verify.config import VerifyConfig
    from or1_verify.verifier_threads import VerifierThreads, judged
    from or1_verify.verifiers import build_verifiers

    config = config or VerifyConfig()
    make = partial(build_verifiers, config, {problem.ability for problem, _, _ in attempts})
    with closing(VerifierThreads(make, config.workers)) as threads:
        for _, verdict in judged(attempts, lambda attempt: threads.verdict(*attempt)):
            yield verdict
