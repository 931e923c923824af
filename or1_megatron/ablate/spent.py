"""The machine-hours of a folder of ablations, and their budget."""

from __future__ import annotations

from pathlib import Path

from or1_megatron.runtime.jsonl import JsonlWriter, read_rows


class Spent:
    """The seconds that runs have taken, by KEPT/spent.jsonl, in which each that ended has a row; and their budget.

    The seconds of a run that was killed with its campaign are lost.
    """

    def __init__(self, kept: Path, hours: float | None = None) -> None:
        """``hours``: of all runs in ``kept``, those of earlier calls included; None: no bound."""
        self._path, self._hours = kept / "spent.jsonl", hours
        rows = read_rows(self._path) if self._path.is_file() else ()
        self.seconds = sum(float(row["seconds"]) for row in rows)

    @property
    def used_up(self) -> bool:
        return self._hours is not None and self.seconds >= 3600 * self._hours

    def add(self, what: str, seconds: float) -> None:
        """Add the seconds of a run; of several that share the machine, each has its part."""
        self.seconds += seconds
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = JsonlWriter(self._path, "the campaign's seconds")
        rows.write({"run": what, "seconds": round(seconds, 1)})
        rows.close()
