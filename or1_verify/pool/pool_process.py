"""The child process of a pool's worker, which judges responses; ``pool.local`` starts it.

The process's first argument is the configuration as JSON, and the second is the abilities as JSON. A request is an
attempt, (problem, response, truncated), and a reply is the verdict's fields.
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
from or1_verify.types import problem_of
from or1_verify.verifier_threads import one_by_one


def _ready() -> Callable[[Any], dict[str, Any]]:
    verifiers = one_by_one(VerifyConfig.model_validate_json(sys.argv[1]), json.loads(sys.argv[2]))
    atexit.register(verifiers.close)
    return lambda attempt: asdict(verifiers.verify(problem_of(attempt[0]), attempt[1], attempt[2]))


if __name__ == "__main__":
    serve(_ready)
