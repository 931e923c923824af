"""Which prompts each step asked and which it took, where that depends on the clock (``rollout.tail: defer``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from or1_megatron.runtime.jsonl import JsonlWriter, read_rows


class TailRecord:
    """``tail.jsonl`` of a run: a row per step; of a step that was made twice the last row counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: JsonlWriter | None = None

    def read(self) -> dict[int, Mapping[str, Any]]:
        """Return the rows by step. Raises ValueError for a line that is not a JSON object."""
        return {int(row["step"]): row for row in read_rows(self._path)} if self._path.is_file() else {}

    def write(self, step: int, asked: Sequence[Any], trained: Sequence[int]) -> None:
        """Append a step: [problem id, seed, place] of each prompt asked, and the indices of those that it trains.

        Raises DiskFullError naming the file.
        """
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = JsonlWriter(self._path, "deferred prompts")
        self._writer.write({"step": step, "asked": list(asked), "trained": list(trained)})
