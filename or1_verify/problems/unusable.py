"""Collects in one pass all data rows that cannot be used, then refuses them, or leaves them out and counts them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Literal

from or1_verify.problems.rows import DataError, RowError

Policy = Literal["refuse", "drop"]

FILE_NAME = "unusable_rows.jsonl"
_SHOWN = 20
_LISTED = 10_000
"""Largest number of rows that are kept in memory and written to the file; further rows are only counted."""

log = logging.getLogger(__name__)


class UnusableRows:
    """Collects the errors of data rows that cannot be used, counted by reason."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._listed: list[RowError] = []

    def __len__(self) -> int:
        return self._reasons.total()

    def add(self, error: RowError) -> None:
        self._reasons[error.reason] += 1
        if len(self._listed) < _LISTED:
            self._listed.append(error)

    def settle(self, policy: Policy, file: Path, setting: str) -> None:
        """Log how many rows are left out (policy drop), or raise DataError if rows were collected (policy refuse).

        Args:
            file: receives the rows as JSON lines {row, reason, message}, unless the error's message shows all of them.
            setting: for the messages, the setting that leaves unusable rows out, for example ``data.unusable=drop``.
        """
        if policy == "refuse":
            self.refuse(file, f"\nCorrect them, or leave them out with {setting}")
        elif self:
            log.warning("%s: %s left out; %s", setting, self._counted(), self._write(file))

    def refuse(self, file: Path | None = None, advice: str = "") -> None:
        """Raise DataError if rows were collected. The message shows 20 of them; ``file`` gets all if there are more."""
        lines = [" ".join(str(error).split()) for error in self._sorted()[:_SHOWN]]
        if not lines:
            return
        if len(self) > 1:
            lines = [f"{self._counted()}:", *(f"  {line}" for line in lines)]
        if len(self) > _SHOWN:
            lines.append(f"  and {len(self) - _SHOWN} more")
            if file is not None:
                lines[-1] += f"; {self._write(file)}"
        raise DataError("\n".join(lines) + advice)

    def _counted(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
        return f"{len(self)} unusable row{'s' if len(self) > 1 else ''} ({reasons})"

    def _write(self, file: Path) -> str:
        """Write the rows to ``file``, and return in words what the file lists."""
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"row": error.origin, "reason": error.reason, "message": str(error)} for error in self._sorted()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{file} lists " + ("them" if len(self) <= _LISTED else f"the first {_LISTED}")

    def _sorted(self) -> list[RowError]:
        return sorted(self._listed, key=_file_and_line)


def _file_and_line(error: RowError) -> tuple[str, int]:
    file, _, line = error.origin.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (error.origin, 0)
