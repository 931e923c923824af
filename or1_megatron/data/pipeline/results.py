"""Results of models, stored for good: sampled once, used by every later build, whatever else of the recipe changes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from or1_megatron.runtime.jsonl import JsonlWriter, read_rows
from or1_verify.problems.rows import DataError


class ResultStore:
    """One JSONL file per model and request settings, with a line per result, written at once: it survives kill -9.

    A result is looked up by (problem, sample).
    """

    def __init__(self, folder: Path, model: str, request_settings: Mapping[str, Any]) -> None:
        """``request_settings``: all that a result depends on beside the problem, such as sampling and prompt."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([model, dict(request_settings)], sort_keys=True)
        safe = re.sub(r"[^\w.-]+", "_", model)
        self.path = folder / f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        self._writer = JsonlWriter(self.path, "a model's answers")
        self._known: dict[str, dict[int, Any]] = {}
        for number, row in enumerate(read_rows(self.path), start=1):
            if not row.keys() >= {"problem", "sample", "result"}:
                raise DataError(
                    f"{self.path}: row {number}: found {sorted(row)}, expected problem, sample and result: take it "
                    "out, and it is asked for again"
                )
            self._known.setdefault(str(row["problem"]), {})[int(row["sample"])] = row["result"]

    def __len__(self) -> int:
        """Return the number of problems with results."""
        return len(self._known)

    def of(self, problem: str) -> Mapping[int, Any]:
        """Return the problem's results by sample."""
        return self._known.get(problem, {})

    def add(self, problem: str, sample: int, result: Any) -> None:
        self._writer.write({"problem": problem, "sample": sample, "result": result})
        self._known.setdefault(problem, {})[sample] = result

    def close(self) -> None:
        self._writer.close()
