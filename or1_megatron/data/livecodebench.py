"""LiveCodeBench's test cases: the public ones as JSON, the private ones as JSON or packed (base64, zlib, pickle)."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

from or1_megatron.data.rows import DataError, shown

_UNPACKED_BYTES = 1 << 30


def test_cases(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """``{inputs, outputs, fn_name?}`` of a code_generation_lite row. Raises DataError naming the column."""
    cases = [
        case
        for column in ("public_test_cases", "private_test_cases")
        for case in _cases(row.get(column), column, origin)
    ]
    tests: dict[str, Any] = {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }
    if any(case.get("testtype") == "functional" for case in cases):
        tests["fn_name"] = _function_name(row.get("metadata"), origin)
    return tests


def _cases(value: Any, column: str, origin: str) -> list[dict[str, Any]]:
    if value in (None, ""):
        return []
    try:
        cases = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        cases = _unpacked(value, column, origin)
    if not isinstance(cases, list) or not all(
        isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases
    ):
        raise DataError(f"{origin}: column '{column}': found {shown(cases)}, expected a list of {{input, output}}")
    return cases


def _unpacked(text: str, column: str, origin: str) -> Any:
    try:
        inflater = zlib.decompressobj()
        packed = inflater.decompress(base64.b64decode(text, validate=True), _UNPACKED_BYTES)
        value = _PlainUnpickler(io.BytesIO(packed)).load()
        return json.loads(value) if isinstance(value, str | bytes) else value
    except (ValueError, binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
        raise DataError(
            f"{origin}: column '{column}': neither JSON nor base64 of a zlib-packed pickle of JSON text "
            f"({type(error).__name__}: {error}), found {shown(text)}"
        ) from None


class _PlainUnpickler(pickle.Unpickler):
    """Strings, numbers, lists and mappings; no classes and no functions, so that nothing of a file is executed."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is asked for; expected plain text")


def _function_name(metadata: Any, origin: str) -> str:
    try:
        decoded = json.loads(metadata) if isinstance(metadata, str) else metadata
        name = decoded["func_name"]
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{origin}: column 'metadata': found {shown(metadata)}; functional tests need the JSON of {{func_name}}"
        )
    return name
