"""Checks reference solutions with verifiers: a worked solution must give the answer, a program must pass its tests."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from or1_megatron.data.pipeline.recipe import VerifiedStepConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.steps import PipelineStep
from or1_verify.config import VerifyConfig
from or1_verify.problems.rows import DataError
from or1_verify.types import Verdict
from or1_verify.verifier_threads import VerifierThreads, judged
from or1_verify.verifiers import build_verifiers

_END_SHOWN_CHARS = 160
_MATH_REASONS = {"wrong": "answer_disagrees", "no_answer": "answer_not_in_solution"}


def verifiers_of(config: VerifiedStepConfig, abilities: Iterable[str]) -> VerifierThreads:
    """Return verifier threads for problems of ``abilities``. A verifier is made when it is first needed."""
    make = partial(build_verifiers, VerifyConfig(timeout_s=config.timeout_s), abilities)
    return VerifierThreads(make, config.workers)


class SolutionStep(PipelineStep[VerifiedStepConfig]):
    """Judges the solutions of each problem of one ability until a solution is right. Keeps problems of other abilities.

    If no problem has the ability, no verifier is made, so no sandbox is needed.
    """

    without_effect = frozenset({"workers"})
    ability: str
    needs_solution: bool
    tries: int
    """Largest number of solutions that are judged per problem."""
    response: str
    """Format string that turns a solution into a response that the verifier can read."""

    def __init__(self, config: VerifiedStepConfig) -> None:
        super().__init__(config)
        self._verifiers = verifiers_of(config, {self.ability})

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        outcomes = [self._checked(row) if row.ability == self.ability else row for row in rows]
        failed = {
            number: (row, list[Verdict]())
            for number, row in enumerate(outcomes)
            if isinstance(row, Candidate) and row.ability == self.ability and row.solutions
        }
        for attempt in range(self.tries):
            trying = [
                (number, row, self.response.format(row.solutions[attempt]))
                for number, (row, _) in failed.items()
                if attempt < len(row.solutions)
            ]
            for (number, row, _), verdict in judged(trying, lambda it: self._verifiers.verdict(it[1].problem(), it[2])):
                if verdict.status == "right":
                    del failed[number]
                else:
                    self._check_verdict(row, verdict)
                    failed[number][1].append(verdict)
        for number, (row, verdicts) in failed.items():
            outcomes[number] = self._excluded(row, verdicts)
        return outcomes

    def close(self) -> None:
        self._verifiers.close()

    def _checked(self, row: Candidate) -> Outcome:
        """Return the candidate, or an exclusion if its ground truth is unusable or a required solution is missing."""
        with self._verifiers.borrowed() as verifiers:
            try:
                verifiers[row.ability].check_ground_truth(row.problem())
            except ValueError as error:
                return self._unusable(row, str(error))
        return Exclusion(row, "no_solution", {}) if self.needs_solution and not row.solutions else row

    def _unusable(self, row: Candidate, why: str) -> Exclusion:
        raise NotImplementedError

    def _check_verdict(self, row: Candidate, verdict: Verdict) -> None:
        """Raise DataError if a verdict other than ``right`` is the verifier's fault, not the solution's."""

    def _excluded(self, row: Candidate, verdicts: Sequence[Verdict]) -> Exclusion:
        """Return the exclusion of a candidate whose judged solutions all failed."""
        raise NotImplementedError


class Answers(SolutionStep):
    """Excludes math problems whose first worked solution does not give the ground truth as its answer."""

    name = "answers"
    ability = "math"
    needs_solution = False
    tries = 1
    response = "</think>\n{}"

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "math-verify": importlib.metadata.version("math-verify")}

    def _unusable(self, row: Candidate, why: str) -> Exclusion:
        return Exclusion(row, "answer_unparsable", {"given": row.ground_truth, "verifier": why})

    def _excluded(self, row: Candidate, verdicts: Sequence[Verdict]) -> Exclusion:
        (verdict,) = verdicts
        evidence = {
            "given": row.ground_truth,
            "extracted": verdict.answer,
            "verifier": verdict.detail,
            "solution_ends": row.solutions[0][-_END_SHOWN_CHARS:],
        }
        return Exclusion(row, _MATH_REASONS.get(verdict.status, "answer_not_comparable"), evidence)


class CodeSolutions(SolutionStep):
    """Excludes code problems with incomplete tests, without solutions, or whose first three solutions fail."""

    name = "code"
    ability = "code"
    needs_solution = True
    tries = 3
    response = "</think>\n```python\n{}\n```"

    def _unusable(self, row: Candidate, why: str) -> Exclusion:
        if not row.ground_truth:
            return Exclusion(row, "no_tests", {})
        return Exclusion(row, "tests_incomplete", {"tests": why})

    def _check_verdict(self, row: Candidate, verdict: Verdict) -> None:
        if verdict.status == "error":  # the sandbox's fault
            raise DataError(
                f"{row.origin}: the sandbox failed on a reference solution: {verdict.detail}; what was judged before "
                "is kept: fix the sandbox (or1 doctor) and run the same command again"
            )

    def _excluded(self, row: Candidate, verdicts: Sequence[Verdict]) -> Exclusion:
        tried = {f"solution {number}": verdict.detail for number, verdict in enumerate(verdicts)}
        return Exclusion(row, "reference_fails", {**tried, "solutions": len(row.solutions)})
