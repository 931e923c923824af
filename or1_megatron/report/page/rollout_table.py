"""The responses of all runs of a page as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from or1_megatron.report.page.recordings import Recording

_WORDS = ("stage", "source", "status", "problem")


@dataclass(frozen=True)
class Book:
    """Columns [n] as of ``Rows``, with ``run`` (which recording) and ``row`` (which of its); runs share ``words``."""

    columns: Mapping[str, NDArray[Any]]
    words: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return len(self.columns["run"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def part(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The columns of these rows."""
        return {name: values[rows] for name, values in self.columns.items()}


def join(recordings: Sequence[Recording]) -> Book:
    """Run after run."""
    known: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
    parts: list[dict[str, NDArray[Any]]] = [_empty()]
    for number, recording in enumerate(recordings):
        rows = recording.rows
        if rows is None:
            continue
        columns = dict(rows.columns)
        for name, codes in known.items():
            shared = np.array([codes.setdefault(word, len(codes)) for word in rows.words[name]], np.int32)
            columns[name] = shared[columns[name]]
        columns["run"] = np.full(len(rows), number, np.int32)
        columns["row"] = np.arange(len(rows), dtype=np.int64)
        parts.append(columns)
    names = parts[-1].keys()
    joined = {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}
    return Book(joined, {name: list(codes) for name, codes in known.items()})


def _empty() -> dict[str, NDArray[Any]]:
    """What there is of no run."""
    whole = ("run", "row", "step", "sample", "tokens", "prompt_tokens", "file", "place", *_WORDS)
    real = ("reward", "advantage", "seconds", "log_prob", "difference", "entropy")
    columns: dict[str, NDArray[Any]] = {name: np.empty(0, np.int32) for name in whole}
    columns |= {name: np.empty(0, np.float32) for name in real}
    return columns | {name: np.empty(0, np.bool_) for name in ("truncated", "kept")}
