"""Difficulty: each model answers each problem N times; problems that every model solves always or never go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from or1_megatron.data.chat import chat_seed
from or1_megatron.data.pipeline.recipe import DifficultyConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, read_column
from or1_megatron.data.pipeline.results import ResultStore
from or1_megatron.data.pipeline.sampling import REFUSED, ModelRun, ModelStep, OpenSampler, result_key, statuses
from or1_megatron.data.pipeline.steps import MakeVerifiers
from or1_megatron.types import ChatRequest
from or1_verify.problems.problem import DIFFICULTY_TRIES
from or1_verify.problems.rows import DataError
from or1_verify.verifier_threads import VerifierThreads, judged


class Difficulty(ModelStep[DifficultyConfig]):
    """Stores the status of each answer's verdict as the result."""

    name = "difficulty"
    code = ("data/pipeline/difficulty.py", "data/pipeline/sampling.py", "data/chat.py")

    def __init__(self, config: DifficultyConfig, results: Path, open_sampler: OpenSampler, make: MakeVerifiers) -> None:
        super().__init__(config, results, open_sampler)
        self._make = make

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), **self._config.model_dump(mode="json", include={"samples_math", "samples_code"})}

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        return [
            _decided(
                row,
                {name: statuses(store.of(result_key(row)), self._tries(row)) for name, store in self._stores.items()},
            )
            for row in rows
        ]

    def _tries(self, row: Candidate) -> int:
        return self._config.samples_code if row.ability == "code" else self._config.samples_math

    def _requests(self, row: Candidate, store: ResultStore) -> list[ChatRequest]:
        key = result_key(row)
        known = store.of(key)
        if REFUSED in known.values():
            return []
        missing = [sample for sample in range(self._tries(row)) if sample not in known]
        return [ChatRequest(key, n, row.messages, chat_seed(self._config.seed, key, n)) for n in missing]

    def _sample_missing(self, model: ModelRun) -> None:
        """Verify each answer as it comes. Raises DataError when a verifier failed: the answer was not judged then."""
        found = {
            ability for shard in model.shards for (column,) in read_column(shard, ("ability",)) for ability in column
        }
        make = partial(self._make, self._config.timeout_s, frozenset(found))
        broken: list[str] = []
        with closing(VerifierThreads(make, self._config.workers)) as verifiers:
            completions = model.completions(lambda row: self._requests(row, model.store), REFUSED)
            for (_, completion), verdict in judged(
                completions, lambda it: verifiers.verdict(it[0].problem(), it[1].text, it[1].truncated)
            ):
                if verdict.status == "error":
                    broken.append(verdict.detail)
                else:
                    request = completion.request
                    model.store.add(request.key, request.sample_index, verdict.status)
        if broken:
            raise DataError(
                f"step 'difficulty': {len(broken)} verdicts on answers of '{model.name}' failed (first: {broken[0]}); "
                "the others are kept: fix the verifier (or1 doctor) and run the same command again"
            )

    def _request_settings(self) -> dict[str, Any]:
        return self._config.model_dump(
            mode="json",
            include={"temperature", "top_p", "max_response_tokens", "max_prompt_tokens", "timeout_s", "seed"},
        )


def _decided(row: Candidate, measured: Mapping[str, Sequence[str]]) -> Outcome:
    """Keep the problem when at least one model is right in some of its tries and wrong in others."""
    counts = {
        model: (len(found) - found.count("right"), len(found))
        for model, found in measured.items()
        if REFUSED not in found
    }
    if not counts:
        return Exclusion(row, "prompt_too_long", {"models": sorted(measured)})
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
    """Scale failures to 16 tries, as ``model_difficulty`` counts them; 0 and 16 only for none and all."""
    if failures in (0, tries):
        return DIFFICULTY_TRIES if failures else 0
    return min(max(round(failures * DIFFICULTY_TRIES / tries), 1), DIFFICULTY_TRIES - 1)
