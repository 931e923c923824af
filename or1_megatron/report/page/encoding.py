"""Encodes data for the HTML page: columns and JSON, compressed.

A packet has three parts, compressed together by gzip: the header's length in bytes (uint32), the header, and the
columns (little endian, columns with the widest numbers first). The header is JSON, and its key ``columns`` maps each
column's name to [dtype, first byte, number of values]. ``web/data.js`` reads packets.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8


def packet(header: Mapping[str, Any], columns: Mapping[str, NDArray[Any]], level: int = 6) -> bytes:
    """Return a header and columns as a packet, compressed at zlib's ``level``.

    Columns are uint8, uint16, int32, uint32 or float32. Float32 columns are rounded to the precision of float16, so
    that gzip needs half the bytes. Raises ValueError for numbers in ``header`` that JSON cannot express.
    """
    places: dict[str, tuple[str, int, int]] = {}
    parts: list[bytes] = []
    at = 0
    for name, values in sorted(columns.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
        if values.dtype == np.float32:
            with np.errstate(over="ignore"):
                values = values.astype(np.float16).astype(np.float32)
        content = values.tobytes()
        places[name] = (values.dtype.name, at, len(values))
        parts.append(content)
        at += len(content)
    described = json.dumps(
        {**header, "columns": places}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()
    described += b" " * (-(4 + len(described)) % _ALIGNMENT)
    whole = b"".join([np.uint32(len(described)).tobytes(), described, *parts])
    return gzip.compress(whole, level, mtime=0)
