"""Which prompts each step asked and which it took, where that depends on the clock (``rollout.tail: defer``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from or1_megatron.errors import UserError
from or1_megatron.runtime.jsonl import JsonlWriter, read_rows


class TailRecordError(UserError, ValueError):
    """A record that cannot be repeated; the message names the file, the row and what was expected."""


class TailRecord:
    """``tail.jsonl`` of a run: a row per step; of a step that was made twice the last row counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: JsonlWriter | None = None

    def read(self) -> dict[int, Mapping[str, Any]]:
        """Return the rows by step. Raises TailRecordError for one that ``write`` cannot have written."""
        if not self._path.is_file():
            return {}
        try:
            rows = list(read_rows(self._path))
        except ValueError as error:
            raise TailRecordError(f"{error}; mend the record, or move it away: the run then defers anew") from None
        for number, row in enumerate(rows, start=1):
            asked, trained = row.get("asked"), row.get("trained")
            if not (
                isinstance(row.get("step"), int)
                and isinstance(asked, list)
                and isinstance(trained, list)
                and all(isinstance(index, int) and 0 <= index < len(asked) for index in trained)
                and len(set(trained)) == len(trained) > 0
            ):
                raise TailRecordError(
                    f"{self._path}: row {number} is {str(row)[:120]}; expected step, asked, and trained with different "
                    "places in asked, from 0. Mend the record, or move it away: the run then defers anew"
                )
        return {row["step"]: row for row in rows}

    def write(self, step: int, asked: Sequence[Any], trained: Sequence[int]) -> None:
        """Append a step: [problem id, seed, place] of each prompt asked, and the indices of those that it trains.

        Raises DiskFullError naming the file.
        """
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = JsonlWriter(self._path, "deferred prompts")
        self._writer.write({"step": step, "asked": list(asked), "trained": list(trained)})
