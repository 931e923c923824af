"""Math: extract the answer again from the worked solution, and keep the problem where both answers agree."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from or1_megatron.data.pipeline.recipe import AnswersConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.steps import VerifierStep
from or1_verify.verifier_threads import judged

_END_SHOWN_CHARS = 160
_REASONS = {"wrong": "answer_disagrees", "no_answer": "answer_not_in_solution"}


class Answers(VerifierStep[AnswersConfig]):
    """Compares the given answer with the one in the first worked solution."""

    name = "answers"
    code = ("data/pipeline/answers.py", "or1_verify")
    ability = "math"

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "math-verify": importlib.metadata.version("math-verify")}

    def check(self, row: Candidate) -> Outcome:
        if why := self.verifiers.check(row.problem()):
            return Exclusion(row, "answer_unparsable", {"given": row.ground_truth, "verifier": why})
        if not row.solutions and self._config.without_solution == "drop":
            return Exclusion(row, "no_solution", {"given": row.ground_truth})
        return row

    def judge(self, rows: Sequence[tuple[int, Candidate]]) -> Iterator[tuple[int, Exclusion]]:
        verdicts = judged(rows, lambda it: self.verifiers.verdict(it[1].problem(), f"</think>\n{it[1].solutions[0]}"))
        for (place, row), verdict in verdicts:
            if verdict.status != "right":
                evidence = {
                    "given": row.ground_truth,
                    "extracted": verdict.answer,
                    "verifier": verdict.detail,
                    "solution_ends": row.solutions[0][-_END_SHOWN_CHARS:],
                }
                yield place, Exclusion(row, _REASONS.get(verdict.status, "answer_not_comparable"), evidence)
