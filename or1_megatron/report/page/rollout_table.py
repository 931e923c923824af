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
class RolloutTable:
    """The columns [n] of ``Rows``, with ``run`` (place among the recordings) and ``row`` (of that run)."""

    columns: Mapping[str, NDArray[Any]]
    words: Mapping[str, Sequence[str]]
    """The words of all runs together."""

    def __len__(self) -> int:
        return len(self.columns["run"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def part(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns of these rows."""
        return {name: values[rows] for name, values in self.columns.items()}


def join(recordings: Sequence[Recording]) -> RolloutTable:
    """Return the table of all runs, run after run."""
    known: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
    parts: list[dict[str, NDArray[Any]]] = []
    for number, recording in enumerate(recordings):
        rows = recording.rows
        columns = {**rows.columns, "run": np.full(len(rows), number, np.int32), "row": np.arange(len(rows))}
        for name, codes in known.items():
            shared = np.array([codes.setdefault(word, len(codes)) for word in rows.words[name]], np.int32)
            columns[name] = shared[columns[name]]
        parts.append(columns)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return RolloutTable(joined, {name: list(codes) for name, codes in known.items()})
