"""The program inside the sandbox that runs a row's Python checker. Standard library only; we never import it.

argv: files with the checker's source, the codec's and the JSON of the arguments, encoded. The submission is over by
then, and only its output is here, as data. Standard output: {"accepted": bool}, or {"broken": words}.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def verdict(source: str, codec_source: str, arguments: str) -> dict[str, Any]:
    codec, checker = ModuleType("codec"), ModuleType("checker")
    exec(codec_source, codec.__dict__)
    try:
        exec(compile(source, "checker.py", "exec"), checker.__dict__)
        check = checker.check
    except BaseException as error:
        return {"broken": complaint(error)}
    try:
        return {"accepted": bool(check(*[codec.decode(item) for item in json.loads(arguments)]))}
    except (NameError, ImportError, AttributeError) as error:
        return {"broken": complaint(error)}
    except BaseException as error:
        return {"accepted": False, "raised": complaint(error)}


def complaint(error: BaseException) -> str:
    return (type(error).__name__ + ": " + str(error))[:300]


def main() -> None:
    channel = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what the checker prints is no answer
    sys.setrecursionlimit(100_000)
    texts = []
    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            texts.append(file.read())
    os.write(channel, json.dumps(verdict(*texts)).encode())


main()
