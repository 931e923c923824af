"""Runs one call of a submission inside the sandbox and reports its value. Standard library only; never imported by us.

argv: the submission's source and the request, a JSON object: ``kind`` ``stdin`` runs the source as ``__main__``;
``evaluate`` runs it as a module, then evaluates one expression over its names and writes the encoded value, one line
of JSON, to the original standard output, while the submission's own prints go nowhere. What this program holds is what
the submission may know: its own source and one test's input; never an expected output.
"""

from __future__ import annotations

import json
import os
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # typing's own is not worth its import, once per test
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def encode(value: Any) -> Any:
    """JSON that keeps the types apart which == keeps apart: tuple, set, frozenset and dict are tagged."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return encode(value.tolist())
    if hasattr(value, "next") and hasattr(value, "val"):
        return {"list_node": [encode(item) for item in walk_list(value)]}
    if hasattr(value, "left") and hasattr(value, "right") and hasattr(value, "val"):
        return {"tree_node": [encode(item) for item in walk_tree(value)]}
    raise TypeError("a result of type " + type(value).__name__ + " cannot be judged")


def walk_list(node: Any) -> Iterator[Any]:
    """Values of a linked list; a cyclic one ends at the memory or time limit."""
    while node is not None:
        yield node.val
        node = node.next


def walk_tree(root: Any) -> list[Any]:
    """LeetCode's level order: None for a missing child, trailing ones left out."""
    values: list[Any] = []
    level = [root]
    for node in level:
        values.append(None if node is None else node.val)
        if node is not None:
            level += [node.left, node.right]
    while values and values[-1] is None:
        values.pop()
    return values


def find(namespace: dict[str, Any], entry_point: str) -> Any:
    """``f``: the function f, or method f of class Solution; ``Solution().f``: that method of a new instance."""
    owner, _, name = entry_point.rpartition("().")
    if not owner and name in namespace:
        return namespace[name]
    return getattr(namespace[owner or "Solution"](), name)


def evaluate(code: CodeType, request: dict[str, Any]) -> None:
    channel = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    namespace: dict[str, Any] = {"__name__": "submission", "__builtins__": __builtins__}
    exec(code, namespace)
    if request["entry_point"]:
        namespace["candidate"] = find(namespace, request["entry_point"])
    if request["arguments"] is None:
        value = eval(compile(request["expression"], "test", "eval"), namespace)
    else:
        value = namespace["candidate"](*request["arguments"])
    channel.write(json.dumps(encode(value)) + "\n")
    channel.flush()


def main() -> None:
    sys.setrecursionlimit(100_000)
    sys.set_int_max_str_digits(0)
    with open(sys.argv[2]) as file:
        request = json.load(file)
    with open(sys.argv[1], encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    code = compile(source, "submission.py", "exec")
    if request["kind"] == "stdin":
        main_module = ModuleType("__main__")
        sys.modules["__main__"] = main_module  # what the submission pickles or looks up is its own
        exec(code, main_module.__dict__)
    else:
        evaluate(code, request)


main()
