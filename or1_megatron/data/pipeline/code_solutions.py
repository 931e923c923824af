"""Code: the tests are complete, and a reference solution passes all of them in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.recipe import CodeConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, read_column
from or1_megatron.data.pipeline.verdicts import MakeVerifiers, VerifierThreads
from or1_megatron.data.rows import DataError
from or1_megatron.types import Verdict


class CodeSolutions:
    """``steps.Step``. Candidates of other abilities pass; without any of code no sandbox is asked for."""

    name = "code"
    code = ("data/pipeline/code_solutions.py", "data/pipeline/verdicts.py", "verify")

    def __init__(self, config: CodeConfig, make: MakeVerifiers) -> None:
        self._config, self._make = config, make
        self._judges: VerifierThreads | None = None

    def settings(self) -> Mapping[str, Any]:
        return self._config.model_dump(mode="json", exclude={"workers"})

    def prepare(self, shards: Sequence[Path]) -> None:
        if any("code" in abilities for shard in shards for (abilities,) in read_column(shard, ("ability",))):
            config = self._config
            self._judges = VerifierThreads(self._make, config.timeout_s, frozenset({"code"}), config.workers)

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        outcomes = [self._checked(row) for row in rows]
        asked = [
            (place, row)
            for place, row in enumerate(outcomes)
            if isinstance(row, Candidate) and row.ability == "code" and row.solutions
        ]
        judges = self._judges
        if judges is None:
            return outcomes
        left = {place: (row, list[str]()) for place, row in asked}
        for attempt in range(self._config.max_solutions):
            trying = [(place, row) for place, (row, _) in left.items() if attempt < len(row.solutions)]
            claims = ((row.problem(), f"</think>\n```python\n{row.solutions[attempt]}\n```") for _, row in trying)
            for (place, row), verdict in zip(trying, judges.verdicts(claims), strict=True):
                if verdict.status == "right":
                    del left[place]
                else:
                    left[place][1].append(_why(row, verdict))
        for place, (row, failures) in left.items():
            tried = {f"solution {n}": failure for n, failure in enumerate(failures)}
            outcomes[place] = Exclusion(row, "reference_fails", {**tried, "solutions": len(row.solutions)})
        return outcomes

    def close(self) -> None:
        if self._judges is not None:
            self._judges.close()
            self._judges = None

    def _checked(self, row: Candidate) -> Outcome:
        if row.ability != "code":
            return row
        assert self._judges is not None
        if not row.ground_truth:
            return Exclusion(row, "no_tests", {})
        if why := self._judges.check(row.problem()):
            return Exclusion(row, "tests_incomplete", {"tests": why})
        if not row.solutions and self._config.without_solution == "drop":
            return Exclusion(row, "no_solution", {})
        return row


def _why(row: Candidate, verdict: Verdict) -> str:
    if verdict.status == "error":  # says nothing of the solution
        raise DataError(
            f"{row.origin}: the sandbox failed on a reference solution: {verdict.detail}; what was judged before is "
            "kept: mend the sandbox (or1 doctor) and run the same command again"
        )
    return verdict.detail
