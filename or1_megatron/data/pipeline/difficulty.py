"""Difficulty: each model answers each problem N times; what every model solves always or never goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.recipe import DifficultyConfig, SampledModel
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, read_candidates, read_column
from or1_megatron.data.pipeline.results import ResultStore
from or1_megatron.data.pipeline.sampling import (
    REFUSED,
    Failures,
    OpenSampler,
    Questions,
    ask_seed,
    identity,
    replies,
    result_key,
    statuses,
)
from or1_megatron.data.pipeline.verdicts import MakeVerifiers, VerifierThreads
from or1_megatron.data.problems import DIFFICULTY_TRIES
from or1_megatron.types import Answer, Ask, Sampling, Verdict


class Difficulty:
    """``steps.Step``. Results stay in a folder of their own: only what a model has not seen yet is sampled."""

    name = "difficulty"
    code = ("data/pipeline/difficulty.py",)

    def __init__(self, config: DifficultyConfig, results: Path, open_sampler: OpenSampler, make: MakeVerifiers) -> None:
        self._config, self._results = config, results
        self._open_sampler, self._make = open_sampler, make
        self._stores: dict[str, ResultStore] = {}

    def settings(self) -> Mapping[str, Any]:
        return {**self._asked_how(), "models": [identity(model) for model in self._config.models]}

    def prepare(self, shards: Sequence[Path]) -> None:
        """Ask every model what it has not answered yet.

        Raises DataError when requests failed; a killed or failed step goes on behind the last answer.
        """
        found = {ability for shard in shards for (column,) in read_column(shard, ("ability",)) for ability in column}
        config = self._config
        judges = VerifierThreads(self._make, config.timeout_s, frozenset(found), config.workers)
        try:
            for model in config.models:
                how = {**self._asked_how(), **identity(model)}
                store = self._stores[model.name] = ResultStore(self._results, model.name, how)
                self._measure(model, shards, store, judges)
        finally:
            judges.close()

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        return [
            _judged(
                row,
                {name: statuses(store.of(result_key(row)), self._tries(row)) for name, store in self._stores.items()},
            )
            for row in rows
        ]

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def _tries(self, row: Candidate) -> int:
        return self._config.samples_code if row.ability == "code" else self._config.samples_math

    def _asks(self, row: Candidate, store: ResultStore) -> list[Ask]:
        known, key = store.of(result_key(row)), result_key(row)
        if REFUSED in known.values():
            return []
        missing = [sample for sample in range(self._tries(row)) if sample not in known]
        return [Ask(key, n, row.messages, ask_seed(self._config.seed, key, n)) for n in missing]

    def _measure(
        self, model: SampledModel, shards: Sequence[Path], store: ResultStore, judges: VerifierThreads
    ) -> None:
        """Ask for what is missing, verify each answer as it comes, and keep its status."""
        config = self._config
        rows = (row for shard in shards for batch in read_candidates(shard) for row in batch)
        questions = Questions(rows, lambda row: self._asks(row, store))
        asks = iter(questions)
        if (one := next(asks, None)) is None:
            return  # nothing is missing: no engine needs to start
        failures = Failures(model.name)
        pending: list[tuple[Answer, Future[Verdict]]] = []
        with ExitStack() as opened:
            sampling = Sampling(config.temperature, config.top_p, config.max_response_tokens)
            sampler = opened.enter_context(self._open_sampler(model, sampling, config.max_prompt_tokens))
            for row, reply in replies(sampler, questions, chain([one], asks), failures):
                pending.append((reply, judges.verdict(row.problem(), reply.text, reply.truncated)))
                pending = list(_unfinished(pending, store))
            for answer, verdict in pending:
                store.add(answer.ask.key, answer.ask.sample, verdict.result().status)
        failures.settle(self.name, store, REFUSED)

    def _asked_how(self) -> dict[str, Any]:
        return self._config.model_dump(
            mode="json",
            include={"temperature", "top_p", "max_response_tokens", "max_prompt_tokens", "timeout_s", "seed"},
        )


def _unfinished(
    pending: Sequence[tuple[Answer, Future[Verdict]]], store: ResultStore
) -> Iterator[tuple[Answer, Future[Verdict]]]:
    for answer, verdict in pending:
        if verdict.done():
            store.add(answer.ask.key, answer.ask.sample, verdict.result().status)
        else:
            yield answer, verdict


def _judged(row: Candidate, measured: Mapping[str, Sequence[str]]) -> Outcome:
    """Kept where at least one model is right in some of its tries and wrong in others."""
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
    """Failures as ``model_difficulty`` counts them, in 16: 0 and 16 only for none and all."""
    if failures in (0, tries):
        return DIFFICULTY_TRIES if failures else 0
    return min(max(round(failures * DIFFICULTY_TRIES / tries), 1), DIFFICULTY_TRIES - 1)
