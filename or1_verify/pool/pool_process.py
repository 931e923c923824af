"""A worker of the pool: a verifier for each ability, and the program that judges batches in a process of its own.

``pool.local`` starts this file as a program. Its first argument is the JSON of its configuration, its second that of
the abilities. A request is a batch of attempts, a reply what ``verify_batch`` returns.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from or1_verify.child_process import serve
from or1_verify.config import VerifyConfig
from or1_verify.types import Attempt, Verdict, problem_of
from or1_verify.verifiers import build_verifiers


class VerifierSet:
    """One verifier per ability. Raises at construction what ``build_verifiers`` raises."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._verifiers = build_verifiers(config, abilities)
        for verifier in self._verifiers.values():
            verifier.start()

    def verify_batch(self, attempts: Sequence[Attempt]) -> list[Verdict]:
        return [self._verifiers[problem.ability].verify(problem, text, cut) for problem, text, cut in attempts]

    def close(self) -> None:
        """End the processes that the verifiers have started."""
        for verifier in self._verifiers.values():
            verifier.close()


def _ready() -> Callable[[Any], Any]:
    config = VerifyConfig.model_validate_json(sys.argv[1])
    verifiers = VerifierSet(config, frozenset(json.loads(sys.argv[2])))
    atexit.register(verifiers.close)

    def judge(attempts: list[Any]) -> Any:
        verdicts = verifiers.verify_batch([(problem_of(fields), text, cut) for fields, text, cut in attempts])
        return {"verdicts": list(map(astuple, verdicts))}

    return judge


if __name__ == "__main__":
    serve(_ready)
