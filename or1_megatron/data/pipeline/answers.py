"""Math: the answer is taken again from the worked solution, and only where both agree does the problem stay."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.recipe import AnswersConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.verdicts import MakeVerifiers, VerifierThreads
from or1_megatron.types import Verdict

_END_SHOWN_CHARS = 160
_REASONS = {
    "wrong": "answer_disagrees",
    "no_answer": "answer_not_in_solution",
    "timeout": "answer_not_comparable",
    "error": "answer_not_comparable",
}


class Answers:
    """``steps.Step``. Candidates of other abilities pass."""

    name = "answers"
    code = ("data/pipeline/answers.py", "data/pipeline/verdicts.py", "verify")

    def __init__(self, config: AnswersConfig, make: MakeVerifiers) -> None:
        self._config, self._make = config, make
        self._judges: VerifierThreads | None = None

    def settings(self) -> Mapping[str, Any]:
        ours = self._config.model_dump(mode="json", exclude={"workers"})
        return {**ours, "math-verify": importlib.metadata.version("math-verify")}

    def prepare(self, shards: Sequence[Path]) -> None:
        config = self._config
        self._judges = VerifierThreads(self._make, config.timeout_s, frozenset({"math"}), config.workers)

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        judges = self._judges
        assert judges is not None
        outcomes: list[Outcome] = [self._checked(row, judges) for row in rows]
        asked = [
            (place, row)
            for place, row in enumerate(outcomes)
            if isinstance(row, Candidate) and row.ability == "math" and row.solutions
        ]
        claims = ((row.problem(), f"</think>\n{row.solutions[0]}") for _, row in asked)
        for (place, row), verdict in zip(asked, judges.verdicts(claims), strict=True):
            outcomes[place] = _compared(row, verdict)
        return outcomes

    def close(self) -> None:
        if self._judges is not None:
            self._judges.close()
            self._judges = None

    def _checked(self, row: Candidate, judges: VerifierThreads) -> Outcome:
        """Excluded where the given answer itself cannot be used, or there is nothing to compare it with."""
        if row.ability != "math":
            return row
        if why := judges.check(row.problem()):
            return Exclusion(row, "answer_unparsable", {"given": row.ground_truth, "verifier": why})
        if not row.solutions and self._config.without_solution == "drop":
            return Exclusion(row, "no_solution", {"given": row.ground_truth})
        return row


def _compared(row: Candidate, verdict: Verdict) -> Outcome:
    if verdict.status == "right":
        return row
    evidence = {
        "given": row.ground_truth,
        "extracted": verdict.answer,
        "verifier": verdict.detail,
        "solution_ends": row.solutions[0][-_END_SHOWN_CHARS:],
    }
    return Exclusion(row, _REASONS.get(verdict.status, "answer_not_comparable"), evidence)
