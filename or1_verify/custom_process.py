"""The child process that loads and calls a user's own verifier (``verify.custom``); also finds objects by path.

Its arguments are the verifier's path and the keys ``right_reward`` and ``lowest_reward``. The answer to a request
``{"operation": "check" | "verify", "problem", "response"}`` is {} for "check", and a verdict's fields for "verify".
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import runpy
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from or1_verify.child_process import serve
from or1_verify.types import Problem, Verdict, VerdictStatus, problem_of

_MEMORY_BYTES = 16 << 30
_LARGEST = 1e30  # groups hold float32
_OURS = ("problem", "response", "truncated")
_EXPECTED = (
    "expected verify or a function of (problem, response, truncated), or one of verl's form: "
    "(data_source, solution_str, ground_truth, extra_info)"
)


def by_path(path: str) -> Any:
    """Return the object at ``package.module:name`` or ``path/to/file.py:name``. Raises any error of the import."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError("expected package.module:name or path/to/file.py:name")
    if module.endswith(".py"):  # whose name may be that of another module
        sys.path.append(str(Path(module).absolute().parent))
        return runpy.run_path(module)[name]
    sys.path.append(str(Path.cwd()))
    return pkgutil.resolve_name(path)


def load(path: str) -> Any:
    """Return the user's verifier at ``path``. Raises ValueError unless it is a function or has a method ``verify``."""
    verifier = by_path(path)
    if isinstance(verifier, type):
        verifier = verifier()
    if not callable(getattr(verifier, "verify", None)) and not callable(verifier):
        raise ValueError(f"is a {type(verifier).__name__}; expected a class with a method verify, or a function")
    return verifier


def caller(verify: Callable[..., Any]) -> Callable[[Problem, str], Any]:
    """Return a function of (problem, response) that calls ``verify``, and passes what the parameters' names ask for."""
    parameters = inspect.signature(verify).parameters
    names = [name.strip("_") for name in parameters]
    of_any_name = [item.kind for item in parameters.values() if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    needed = [name for name, item in parameters.items() if item.default is item.empty and item.kind not in of_any_name]
    if len(names) >= 3 >= len(needed) and all(name in (ours, "") for name, ours in zip(names, _OURS, strict=False)):
        return lambda problem, response: verify(problem, response, False)
    open_ended = inspect.Parameter.VAR_KEYWORD in of_any_name
    if "solution_str" in names and set(needed) <= _as_verl(Problem("", "", "", (), "[]", {}, ""), "").keys():
        return lambda problem, response: verify(
            **{name: value for name, value in _as_verl(problem, response).items() if open_ended or name in names}
        )
    raise ValueError(f"has the signature ({', '.join(map(str, parameters.values()))}); {_EXPECTED}")


def _as_verl(problem: Problem, response: str) -> dict[str, Any]:
    """Return the keyword arguments of verl's reward functions. A list of one answer is passed as that answer."""
    try:
        golds = json.loads(problem.ground_truth)
    except ValueError:
        golds = None
    single = isinstance(golds, list) and len(golds) == 1 and isinstance(golds[0], str)
    return {
        "data_source": problem.source,
        "solution_str": response,
        "ground_truth": golds[0] if single else problem.ground_truth,
        "extra_info": {"index": problem.id, "model_difficulty": dict(problem.difficulty)},
    }


def checked(result: Any, right: float = 1.0, lowest: float = 0.0) -> dict[str, Any]:
    """Return the fields of the verdict that a user's verifier returned as ``result``.

    ``result``: a Verdict, a number (also a bool or NumPy's), or a mapping with a number as ``score`` or ``reward``.
    ``right``: lowest reward of a response that counts as right. ``lowest``: lowest reward that is allowed.

    Raises TypeError for a ``result`` of another type, ValueError for a reward or status that is not allowed.
    """
    reward, details = result, {}
    if isinstance(result, Mapping):
        key = next((name for name in ("score", "reward") if name in result), None)
        reward = result[key] if key else None
        details = {name: value for name, value in result.items() if name != key}
    elif isinstance(result, Verdict):
        reward = result.reward
    reward = reward.item() if hasattr(reward, "item") else reward
    if not isinstance(reward, bool | int | float):
        raise TypeError(
            f"returned {result!r:.200}, expected a number, a mapping with 'score' or 'reward', or a Verdict"
        )
    if not lowest <= reward <= _LARGEST:
        raise ValueError(
            f"returned the reward {reward}, expected a finite number from verify.lowest_reward = {lowest:g} up"
        )
    status = "right" if reward >= right else "wrong"
    if not isinstance(result, Verdict):
        detail = str(details)[:1000] if details else ""
        return {"status": status, "answer": "", "detail": detail, "reward": float(reward)}
    if result.status not in get_args(VerdictStatus) or (result.status == "right") != (status == "right"):
        raise ValueError(
            f"returned status '{result.status}' with reward {result.reward}; 'right' is from {right:g} up "
            "(verify.right_reward), the others below"
        )
    return {"status": result.status, "answer": result.answer, "detail": result.detail, "reward": float(reward)}


def answer(
    verifier: Any, verify: Callable[[Problem, str], Any], limits: tuple[float, float], request: dict[str, Any]
) -> dict[str, Any]:
    problem = problem_of(request["problem"])
    if request["operation"] == "check":
        check = getattr(verifier, "check_ground_truth", None)
        if check is not None:
            check(problem)
        return {}
    try:
        return checked(verify(problem, request["response"]), *limits)
    except MemoryError:  # an error of the verifier's, not of the response
        raise RuntimeError(f"it needs more than the {_MEMORY_BYTES >> 30} GiB of memory that it may use") from None


def _ready() -> Callable[[Any], dict[str, Any]]:
    verifier = load(sys.argv[1])
    verify = caller(getattr(verifier, "verify", verifier))
    return partial(answer, verifier, verify, (float(sys.argv[2]), float(sys.argv[3])))


if __name__ == "__main__":
    serve(_ready, _MEMORY_BYTES)
