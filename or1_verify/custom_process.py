"""The child process that holds a user's verifier for ``verify.custom``. Nothing else imports this file.

Its first argument names the verifier. ``{"operation": "check" | "verify", "problem", "response"}`` is answered by a
verdict's fields.
"""

from __future__ import annotations

import pkgutil
import sys
from functools import partial
from typing import Any, get_args

from or1_verify.child_process import serve
from or1_verify.types import Verdict, VerdictStatus, problem_of

_MEMORY_BYTES = 16 << 30


def load(path: str) -> Any:
    """Return the object with ``verify``, or the function, that ``path`` names. Raises ValueError."""
    if not path.partition(":")[2]:
        raise ValueError("expected package.module:name")
    verifier = pkgutil.resolve_name(path)
    if isinstance(verifier, type):
        verifier = verifier()
    if not callable(getattr(verifier, "verify", None)) and not callable(verifier):
        raise ValueError(f"is a {type(verifier).__name__}; expected a class with a method verify, or a function")
    return verifier


def checked(result: Any) -> dict[str, Any]:
    """Return a verdict for ``ChildProcess.judge``. Raises TypeError or ValueError for anything that is no verdict."""
    if isinstance(result, bool | int | float) and result in (0, 1):
        return {"status": "right" if result else "wrong", "answer": "", "detail": ""}
    if not isinstance(result, Verdict):
        raise TypeError(f"returned {result!r:.200}, expected a Verdict, or a reward of 0 or 1")
    if result.status not in get_args(VerdictStatus) or result.reward != float(result.status == "right"):
        raise ValueError(f"returned status '{result.status}' with reward {result.reward}; only 'right' has reward 1")
    return {"status": result.status, "answer": result.answer, "detail": result.detail}


def answer(verifier: Any, request: dict[str, Any]) -> dict[str, Any]:
    problem = problem_of(request["problem"])
    if request["operation"] == "check":
        check = getattr(verifier, "check_ground_truth", None)
        if check is not None:
            check(problem)
        return {}
    verify = getattr(verifier, "verify", verifier)
    try:
        return checked(verify(problem, request["response"], False))
    except MemoryError:  # an error of the verifier's, not of the response
        raise RuntimeError(f"it needs more than the {_MEMORY_BYTES >> 30} GiB of memory that it may use") from None


if __name__ == "__main__":
    serve(lambda: partial(answer, load(sys.argv[1])), _MEMORY_BYTES)
