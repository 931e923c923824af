"""Comparison of a submission's output with the expected one, outside the sandbox.

What comes out of the sandbox is bytes; they become plain built-in values here, so no ``__eq__``, ``__hash__`` or
other code of the submission takes part. Anything that cannot be read is simply not equal.
"""

from __future__ import annotations

import json
import math
from typing import Any

from or1_megatron.verify.code_tests import Comparison

_FLOAT_TOLERANCE = 1e-9


def output_matches(output: bytes, expected: Any, comparison: Comparison) -> bool:
    """Whether standard output (comparison "lines") or the runner's encoded value is the expected one."""
    if comparison == "lines":
        return _lines(output.decode("utf-8", "replace")) == _lines(expected)
    try:
        encoded = json.loads(output)
        if comparison == "python":
            return bool(_decode(encoded) == expected)
        if comparison == "json":
            found = _as_json(encoded)
            unwrapped = isinstance(expected, list) and len(expected) == 1 and _equal(expected[0], found)
            return _equal(expected, found) or unwrapped  # such data often wraps the one result in a list
        values = [] if encoded is None else encoded[comparison]
        return bool([_decode(value) for value in values] == expected)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return False


def _lines(text: str) -> list[list[str]]:
    """Tokens of each line; trailing empty lines do not count."""
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _decode(encoded: Any) -> Any:
    """The inverse of the runner's ``encode`` for built-in types. Raises KeyError or TypeError for anything else."""
    if isinstance(encoded, list):
        return [_decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((tag, value),) = encoded.items()
    if tag == "dict":
        return {_decode(key): _decode(item) for key, item in value}
    if tag == "bytes":
        return bytes.fromhex(value)
    return {"tuple": tuple, "set": set}[tag](_decode(item) for item in value)


def _as_json(encoded: Any) -> Any:
    """The value as JSON would hold it: tuples and sets as lists, keys as strings."""
    if isinstance(encoded, list):
        return [_as_json(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((tag, value),) = encoded.items()
    if tag == "dict":
        return {key if isinstance(key, str) else json.dumps(_as_json(key)): _as_json(item) for key, item in value}
    if tag not in ("tuple", "list_node", "tree_node"):
        raise TypeError(f"a {tag} is not a JSON value")
    return [_as_json(item) for item in value]


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, float) or isinstance(found, float):
        numbers = isinstance(expected, int | float) and isinstance(found, int | float)
        return numbers and math.isclose(expected, found, rel_tol=_FLOAT_TOLERANCE, abs_tol=_FLOAT_TOLERANCE)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_equal, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_equal(expected[key], found[key]) for key in expected)
    return type(expected) is type(found) and bool(expected == found)
