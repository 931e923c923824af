"""Data inside a page: columns and JSON, compressed and in base64, so that no content can end its element.

A packet is the gzip of: the header's length (uint32), the header (JSON, with ``columns``: name to [dtype, first byte,
length]), and the columns, little endian, each at a multiple of 8 bytes. ``web/data.js`` reads it.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEVEL = 6
_ALIGNMENT = 8
_DROPPED_BITS = 12
"""Bits dropped from the 23 of a float32's mantissa. Three digits and half of the compressed bytes are left."""


def packet(header: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> str:
    """Return the packet in base64. Columns are uint8, uint16, int32, uint32 or float32 (kept to three digits).

    Raises ValueError for any other type, and for numbers in ``header`` that JSON cannot express.
    """
    places: dict[str, tuple[str, int, int]] = {}
    parts: list[bytes] = []
    at = 0
    for name, values in columns.items():
        if values.dtype.name not in ("uint8", "uint16", "int32", "uint32", "float32"):
            raise ValueError(f"column '{name}' is {values.dtype}, which the page cannot read")
        content = (rounded(values) if values.dtype.name == "float32" else values).tobytes()
        places[name] = (values.dtype.name, at, len(values))
        padding = -len(content) % _ALIGNMENT
        parts += [content, bytes(padding)]
        at += len(content) + padding
    described = json.dumps(
        {**header, "columns": places}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()
    described += b" " * (-(4 + len(described)) % _ALIGNMENT)
    whole = b"".join([np.uint32(len(described)).tobytes(), described, *parts])
    return base64.b64encode(gzip.compress(whole, _LEVEL, mtime=0)).decode()


def rounded(values: NDArray[Any]) -> NDArray[np.float32]:
    """Round float32 to three digits; nan and infinities stay. The dropped bits are zero, which gzip compresses well."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(1 << (_DROPPED_BITS - 1))) & ~np.uint32((1 << _DROPPED_BITS) - 1)
    return np.where(np.isfinite(values), nearest.view(np.float32), values).astype(np.float32)
