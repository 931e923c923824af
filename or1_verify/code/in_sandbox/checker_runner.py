"""Runs a problem's Python checker inside a sandbox.

Standard input: a JSON list of the checker's source and the JSON of its encoded arguments. The submission
has ended by now, and only its output is here, as data. Standard output: {"accepted": bool}, or {"broken": words}.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

import codec  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def verdict(source: str, arguments: str) -> dict[str, Any]:
    checker = ModuleType("checker")
    try:
        exec(compile(source, "checker.py", "exec"), checker.__dict__)
        check = checker.check
    except BaseException as error:
        return {"broken": codec.complaint(error)}
    given: list[Any] = []
    try:
        given = [codec.decode(item) for item in json.loads(arguments)]
        return {"accepted": bool(check(*given))}
    except (NameError, ImportError) as error:
        return {"broken": codec.complaint(error)}
    except AttributeError as error:
        rows_own = any(error.obj is item for item in given[::2]) and error.obj is not given[1]
        # what the output lacks, it lacks because it is of another type than the checker expects
        kind = "broken" if rows_own or isinstance(error.obj, ModuleType) else "raised"
        return {"accepted": False, kind: codec.complaint(error)}
    except BaseException as error:
        return {"accepted": False, "raised": codec.complaint(error)}


channel = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what the checker prints must not look like an answer
sys.setrecursionlimit(100_000)
os.write(channel, json.dumps(verdict(*json.load(sys.stdin))).encode())
