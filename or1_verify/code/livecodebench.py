"""Reads LiveCodeBench's tests: JSON, and for private tests also base64 of zlib of a pickle of JSON text.

The pickle is never loaded, so it cannot make an object or call a function: it may hold only one string, which is read
from its opcodes.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping
from typing import Any

MAX_TEST_BYTES = 1 << 30
"""Largest decompressed size of one problem's private tests. In LiveCodeBench they have at most a few hundred MB."""

_STRINGS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"})


def as_input_output(decoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of a LiveCodeBench row as {inputs, outputs, fn_name?, starter_code?}, public tests first.

    Raises ValueError with the field, what was found and what was expected.
    """
    tests = [
        *_tests("public_test_cases", decoded.get("public_test_cases") or []),
        *_tests("private_test_cases", decoded.get("private_test_cases") or []),
    ]
    metadata = decoded.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = _json("metadata", metadata)
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    kinds = {test["testtype"] for test in tests}
    if len(kinds) > 1 or kinds - {"stdin", "functional"}:
        raise ValueError(f"testtype: found {sorted(map(str, kinds))}, expected all 'stdin' or all 'functional'")
    if kinds == {"functional"} and not name:
        raise ValueError("metadata: no func_name, which functional tests need")
    truth: dict[str, Any] = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    if kinds == {"functional"}:
        truth |= {"fn_name": name, "starter_code": decoded.get("starter_code") or ""}
    return truth


def _tests(field: str, value: Any) -> list[dict[str, str]]:
    if isinstance(value, str):
        packed = field.startswith("private") and not value.lstrip().startswith("[")
        value = _json(field, decompress(value) if packed else value)
    if not isinstance(value, list):
        raise ValueError(f"{field}: found a {type(value).__name__}, expected a list of tests")
    for number, test in enumerate(value):
        if not isinstance(test, dict) or not all(isinstance(test.get(k), str) for k in ("input", "output", "testtype")):
            raise ValueError(f"{field}[{number}]: found {test!r:.100}, expected {{input, output, testtype}}, all text")
    return value


def decompress(text: str) -> str:
    """Return the one string that base64 of zlib of a pickle holds. Raises ValueError for anything else."""
    try:
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TEST_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"private_test_cases: neither JSON nor base64 of zlib ({error})") from None
    if not unpacker.eof:
        raise ValueError(f"private_test_cases: cut off, or more than {MAX_TEST_BYTES} bytes when decompressed")
    strings = []
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in _STRINGS:
                strings.append(argument)
            elif opcode.name not in _HARMLESS:
                raise ValueError(f"it has a {opcode.name}")
    except (ValueError, UnicodeError, IndexError) as error:
        raise ValueError(f"private_test_cases: the pickle is not that of one string ({error}); not loaded") from None
    if len(strings) != 1 or not isinstance(strings[0], str):
        raise ValueError(f"private_test_cases: the pickle holds {len(strings)} strings, expected one; not loaded")
    return strings[0]


def _json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{field}: not JSON ({error})") from None
