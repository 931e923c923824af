"""A worker of the pool: a verifier for each ability, and the program that judges in a process of its own.

``pool.local`` starts this file as a program. Its first argument is the JSON of its configuration, its second that of
the abilities. A request is an attempt, a reply its verdict.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
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

    def verify(self, attempt: Attempt) -> Verdict:
        return self._verifiers[attempt[0].ability].verify(*attempt)

    def close(self) -> None:
        """End the processes that the verifiers have started."""
        for verifier in self._verifiers.values():
            verifier.close()


def _ready() -> Callable[[Any], dict[str, Any]]:
    config = VerifyConfig.model_validate_json(sys.argv[1])
    verifiers = VerifierSet(config, frozenset(json.loads(sys.argv[2])))
    atexit.register(verifiers.close)
    return lambda attempt: asdict(verifiers.verify((problem_of(attempt[0]), attempt[1], attempt[2])))


if __name__ == "__main__":
    serve(_ready)
