"""Code: the tests are complete, and a reference solution passes all of them in the sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from or1_megatron.data.pipeline.recipe import CodeConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.steps import VerifierStep
from or1_verify.problems.rows import DataError
from or1_verify.types import Verdict
from or1_verify.verifier_threads import judged


class CodeSolutions(VerifierStep[CodeConfig]):
    """Runs reference solutions on all tests, one after another until one passes."""

    name = "code"
    code = ("data/pipeline/code_solutions.py", "or1_verify")
    ability = "code"

    def check(self, row: Candidate) -> Outcome:
        if not row.ground_truth:
            return Exclusion(row, "no_tests", {})
        if why := self.verifiers.check(row.problem()):
            return Exclusion(row, "tests_incomplete", {"tests": why})
        if not row.solutions and self._config.without_solution == "drop":
            return Exclusion(row, "no_solution", {})
        return row

    def judge(self, rows: Sequence[tuple[int, Candidate]]) -> Iterator[tuple[int, Exclusion]]:
        left = {place: (row, list[str]()) for place, row in rows}
        for attempt in range(self._config.max_solutions):
            trying = [
                (place, row, f"</think>\n```python\n{row.solutions[attempt]}\n```")
                for place, (row, _) in left.items()
                if attempt < len(row.solutions)
            ]
            for (place, row, _), verdict in judged(trying, lambda it: self.verifiers.verdict(it[1].problem(), it[2])):
                if verdict.status == "right":
                    del left[place]
                else:
                    left[place][1].append(_why(row, verdict))
        for place, (row, failures) in left.items():
            tried = {f"solution {n}": failure for n, failure in enumerate(failures)}
            yield place, Exclusion(row, "reference_fails", {**tried, "solutions": len(row.solutions)})


def _why(row: Candidate, verdict: Verdict) -> str:
    if verdict.status == "error":  # the sandbox's fault, not the solution's
        raise DataError(
            f"{row.origin}: the sandbox failed on a reference solution: {verdict.detail}; what was judged before is "
            "kept: fix the sandbox (or1 doctor) and run the same command again"
        )
    return verdict.detail
