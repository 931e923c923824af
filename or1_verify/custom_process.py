"""The child process that holds a user's verifier for ``verify.custom``. Nothing else imports this file.

It speaks one JSON object per line. The first line out says whether the verifier that argv names could be loaded. Then
every ``{"operation": "check" | "verify", "problem", "response"}`` is answered by a verdict's fields, or ``{"raised"}``.
The end of the input ends the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import sys
from typing import Any, get_args

from or1_verify.child_process import die_with_parent
from or1_verify.custom import ENTRY_POINTS
from or1_verify.types import Message, Problem, Verdict, VerdictStatus

_MEMORY_BYTES = 16 << 30


def load(path: str) -> Any:
    """Return the object with ``verify``, or the function, that ``path`` names. Raises ValueError."""
    if ":" in path:
        module_name, _, name = path.partition(":")
        verifier: Any = importlib.import_module(module_name)
        for part in name.split("."):
            verifier = getattr(verifier, part)
    else:
        known = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
        if path not in known:
            raise ValueError(
                f"expected package.module:name, or an entry point of group {ENTRY_POINTS} (there are: "
                f"{', '.join(sorted(known)) or 'none'})"
            )
        verifier = known[path].load()
    if isinstance(verifier, type):
        verifier = verifier()
    if not callable(getattr(verifier, "verify", None)) and not callable(verifier):
        raise ValueError(f"is a {type(verifier).__name__}; expected a class with a method verify, or a function")
    return verifier


def checked(result: Any) -> dict[str, Any]:
    """Return a verdict's fields. Raises TypeError or ValueError for anything that is no verdict."""
    if isinstance(result, bool | int | float) and result in (0, 1):
        return {"reward": float(result), "status": "right" if result else "wrong", "answer": "", "detail": ""}
    if not isinstance(result, Verdict):
        raise TypeError(f"returned {result!r:.200}, expected a Verdict, or a reward of 0 or 1")
    if result.status not in get_args(VerdictStatus) or result.reward != float(result.status == "right"):
        raise ValueError(f"returned status '{result.status}' with reward {result.reward}; only 'right' has reward 1")
    return {"reward": result.reward, "status": result.status, "answer": result.answer, "detail": result.detail}


def answer(verifier: Any, request: dict[str, Any]) -> dict[str, Any]:
    fields = request["problem"]
    problem = Problem(**{**fields, "messages": tuple(Message(**message) for message in fields["messages"])})
    if request["operation"] == "check":
        check = getattr(verifier, "check_ground_truth", None)
        if check is not None:
            check(problem)
        return {}
    verify = getattr(verifier, "verify", verifier)
    return checked(verify(problem, request["response"], False))


def main() -> None:
    path, parent = sys.argv[1], int(sys.argv[2])
    if parent:
        die_with_parent(parent)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the verifier prints must not look like a reply
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        verifier = load(path)
    except Exception as error:  # a user's module may raise anything
        reply({"raised": f"cannot be loaded: {type(error).__name__}: {error}"})
        return
    reply({})
    for line in sys.stdin.buffer:
        try:
            reply(answer(verifier, json.loads(line)))
        except Exception as error:
            reply({"raised": f"{type(error).__name__}: {error}"[:1000]})


if __name__ == "__main__":
    main()
