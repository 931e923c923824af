r"""Rule-based verifiers of math and code: responses in, verdicts out. They need no torch, Ray, engine or trainer.

    from or1_verify import verify

    verify("math", '["12"]', r"... </think> \boxed{12}").status  # "right"

``verify_many`` judges many, ``verify_file`` a file; ``build_verifiers`` gives the verifiers themselves, for whoever
keeps them between verdicts (README.md).

What takes long to import comes when it is first used: the verifiers' child processes import this file too.
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
    """Judge one response, in processes that start and end here: a second or so.

    Args:
        ability: "math", "code" or one of ``config.custom``.
        ground_truth: for math the JSON of a list of answers, for code that of the tests (docs/code_verifier.md).
        truncated: the response was cut off at its length limit.

    Raises:
        ValueError: an ability without a verifier, or a ground truth that cannot be used.
        UserError: a custom verifier that cannot be loaded; for code, a machine where no sandbox works.
    """
    from or1_verify.config import VerifyConfig
    from or1_verify.verifiers import build_verifiers

    problem = Problem("", "", ability, (), ground_truth, {}, "the problem")
    with closing(build_verifiers(config or VerifyConfig(), {ability})[ability]) as verifier:
        verifier.check_ground_truth(problem)
        return verifier.verify(problem, response, truncated)


def verify_many(attempts: Sequence[Attempt], config: VerifyConfig | None = None) -> Iterator[Verdict]:
    """Yield the verdicts on (problem, response, truncated) in their order; ``config.workers`` are made at once.

    Raises what ``verify`` does. Ground truths are not checked first: one that cannot be used ends the iteration.
    """
    from or1_verify.config import VerifyConfig
    from or1_verify.verifier_threads import VerifierThreads, judged
    from or1_verify.verifiers import build_verifiers

    config = config or VerifyConfig()
    make = partial(build_verifiers, config, {problem.ability for problem, _, _ in attempts})
    with closing(VerifierThreads(make, config.workers)) as threads:
        for _, verdict in judged(attempts, lambda attempt: threads.verdict(*attempt)):
            yield verdict
