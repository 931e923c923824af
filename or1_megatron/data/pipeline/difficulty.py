"""Difficulty filter of the data build: keeps a problem if some model solves it in some, but not all, of N tries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from or1_megatron.data.pipeline.recipe import DifficultyConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, read_columns
from or1_megatron.data.pipeline.sampling import REFUSED, Answers, ModelStep, OpenSampler, ResultStore
from or1_megatron.data.pipeline.solutions import verifiers_of
from or1_megatron.types import ChatRequest
from or1_verify.problems.rows import DIFFICULTY_TRIES, DataError
from or1_verify.verifier_threads import judged


class Difficulty(ModelStep[DifficultyConfig]):
    """Samples and verifies each model's answers to each problem. A result is the status of an answer's verdict."""

    name = "difficulty"
    only_counts = frozenset({"samples_math", "samples_code"})

    def __init__(self, config: DifficultyConfig, results: Path, open_sampler: OpenSampler) -> None:
        super().__init__(config, results, open_sampler)
        self._broken: list[str] = []  # verdicts that failed: their answers were not judged

    def prepare(self, shards: Sequence[Path]) -> None:
        abilities = {ability for (column,) in read_columns(shards, ("ability",)) for ability in column}
        with closing(verifiers_of(self._config, abilities)) as self._verifiers:
            super().prepare(shards)

    def _samples(self, row: Candidate) -> int:
        return self._config.samples_code if row.ability == "code" else self._config.samples_math

    def _judged(self, answers: Answers) -> Iterator[tuple[ChatRequest, str]]:
        for (_, answer), verdict in judged(
            answers, lambda it: self._verifiers.verdict(it[0].problem(), it[1].text, it[1].truncated)
        ):
            if verdict.status == "error":
                self._broken.append(verdict.detail)
            else:
                yield answer.request, verdict.status

    def _check(self, model: str, rows: Iterator[Candidate], store: ResultStore) -> None:
        if broken := self._broken:
            raise DataError(
                f"step 'difficulty': {len(broken)} verdicts on answers of '{model}' failed (first: {broken[0]}); the "
                "others are kept: fix the verifier (or1 doctor) and run the same command again"
            )

    def _decided(self, row: Candidate, given: Mapping[str, Sequence[str]]) -> Outcome:
        """Keep the problem, with its measured difficulty, if a model solved it in some, but not all, of its tries."""
        counts = {
            model: (sum(status != "right" for status in statuses), len(statuses))
            for model, statuses in given.items()
            if REFUSED not in statuses
        }
        if not counts:
            return Exclusion(row, "prompt_too_long", {"models": sorted(given)})
        difficulty = {**row.difficulty, **{model: of_sixteen(*count) for model, count in counts.items()}}
        kept = replace(row, difficulty=difficulty)
        if any(0 < failures < tries for failures, tries in counts.values()):
            return kept
        evidence = {model: f"{tries - failures} of {tries} right" for model, (failures, tries) in counts.items()}
        if all(failures == 0 for failures, _ in counts.values()):
            return Exclusion(kept, "always_solved", evidence)
        never = all(failures == tries for failures, tries in counts.values())
        return Exclusion(kept, "never_solved" if never else "always_or_never_solved", evidence)


def of_sixteen(failures: int, tries: int) -> int:
    """Return failures scaled to 16 tries (``model_difficulty``): 0 only if no try failed, 16 only if all failed."""
    if failures in (0, tries):
        return DIFFICULTY_TRIES if failures else 0
    return min(max(round(failures * DIFFICULTY_TRIES / tries), 1), DIFFICULTY_TRIES - 1)
