"""Base of the data build's steps that ask models: requests missing answers, and stores each result when it comes.

Results are kept on disk by model and request settings, so they stay valid when other parts of the recipe change, and a
killed or failed step resumes after its last result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.recipe import DifficultyConfig, JudgesConfig, SampledModel
from or1_megatron.data.pipeline.records import Candidate, Outcome, read_candidates
from or1_megatron.data.pipeline.steps import PipelineStep
from or1_megatron.interfaces import Sampler
from or1_megatron.runtime.jsonl import JsonlWriter, read_rows
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import ChatCompletion, ChatRequest, Replies, Sampling
from or1_verify.problems.rows import DataError
from or1_verify.types import Message

OpenSampler = Callable[[SampledModel, Sampling, int], AbstractContextManager[Sampler]]
"""(model, sampling, longest prompt in tokens) -> context manager that gives a sampler. Its exit ends the engines."""

Answers = Iterator[tuple[Candidate, ChatCompletion]]

REFUSED = "refused"
"""Result of a request that the model refuses for good, e.g. because the prompt is too long."""


class ResultStore:
    """A model's results by (problem, sample). The JSONL file has a line per result, and kill -9 does not damage it."""

    def __init__(self, folder: Path, model: str, request_settings: Mapping[str, Any]) -> None:
        """Open a model's store. ``request_settings``: all settings, such as sampling, that affect a result."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([model, dict(request_settings)], sort_keys=True)
        safe = re.sub(r"[^\w.-]+", "_", model)
        self.path = folder / f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        self._writer = JsonlWriter(self.path, "a model's answers")
        self._known: dict[str, dict[int, str]] = {}
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

    def of(self, row: Candidate) -> Mapping[int, str]:
        """Return a problem's results, each by its sample index."""
        return self._known.get(_key(row), {})

    def add(self, request: ChatRequest, result: str) -> None:
        self._writer.write({"problem": request.key, "sample": request.sample_index, "result": result})
        self._known.setdefault(request.key, {})[request.sample_index] = result

    def close(self) -> None:
        self._writer.close()


class ModelStep[M: DifficultyConfig | JudgesConfig](PipelineStep[M]):
    """Base of the steps that ask models. A subclass defines the question, an answer's result, and the decision."""

    only_counts: frozenset[str]
    """Keys of the step's configuration that change the decision about a problem, but not the models' results."""

    def __init__(self, config: M, results: Path, open_sampler: OpenSampler) -> None:
        super().__init__(config)
        self._results, self._open_sampler = results / self.name, open_sampler
        self._stores: dict[str, ResultStore] = {}

    def settings(self) -> Mapping[str, Any]:
        decisive = self._config.model_dump(mode="json", include=set(self.only_counts))
        return {**self._request_settings(), **decisive, "models": [_identity(model) for model in self._config.models]}

    def prepare(self, shards: Sequence[Path]) -> None:
        """Sample the missing answers of each model. A model's engines start only if answers are missing.

        Raises DataError if requests failed.
        """
        config = self._config
        sampling = Sampling(config.temperature, config.top_p, config.max_response_tokens)
        for model in config.models:
            store = ResultStore(self._results, model.name, {**self._request_settings(), **_identity(model)})
            self._stores[model.name] = store
            missing = self._missing(read_candidates(shards), store)
            if (first := next(missing, None)) is not None:
                with self._open_sampler(model, sampling, config.max_prompt_tokens) as sampler:
                    self._sample(model.name, store, sampler, chain([first], missing))
            self._check(model.name, read_candidates(shards), store)

    def decide(self, row: Candidate, number: int) -> Outcome:
        if not self._samples(row):
            return row
        return self._decided(row, {name: self._given(row, store) for name, store in self._stores.items()})

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _samples(self, row: Candidate) -> int:
        """Return how often each model is asked about a problem. With 0 the problem is kept without asking."""
        raise NotImplementedError

    def _messages(self, row: Candidate) -> tuple[Message, ...]:
        return row.messages

    def _judged(self, answers: Answers) -> Iterator[tuple[ChatRequest, str]]:
        """Yield (request, result) for each answer that could be judged."""
        raise NotImplementedError

    def _check(self, model: str, rows: Iterator[Candidate], store: ResultStore) -> None:
        """Raise DataError if a model's results cannot be trusted."""
        raise NotImplementedError

    def _decided(self, row: Candidate, given: Mapping[str, Sequence[str]]) -> Outcome:
        """Return the decision about a problem. ``given``: for each model, the results of its answers."""
        raise NotImplementedError

    def _request_settings(self) -> dict[str, Any]:
        """Return all settings that affect a result, except those of the model."""
        return self._config.model_dump(mode="json", exclude={"models", "workers", *self.only_counts})

    def _given(self, row: Candidate, store: ResultStore) -> list[str]:
        known = store.of(row)
        return [known[sample] for sample in sorted(known)[: self._samples(row)]]

    def _missing(self, rows: Iterable[Candidate], store: ResultStore) -> Iterator[tuple[Candidate, ChatRequest]]:
        for row in rows:
            known, key = store.of(row), _key(row)
            if REFUSED in known.values():
                continue
            for sample in range(self._samples(row)):
                if sample not in known:
                    seed = derive_seed(self._config.seed, key, sample)
                    yield row, ChatRequest(key, sample, self._messages(row), seed)

    def _sample(
        self, model: str, store: ResultStore, sampler: Sampler, missing: Iterable[tuple[Candidate, ChatRequest]]
    ) -> None:
        """Send the missing requests, and store each result as it comes (REFUSED if the model refuses for good).

        Raises DataError after the last answer if requests failed. Raises it too if the model refuses every request, and
        then stores no refusal, because the requests are wrong, not the problems.
        """
        waiting: dict[tuple[str, int], Candidate] = {}
        sent = 0

        def requests() -> Iterator[ChatRequest]:
            nonlocal sent
            for row, request in missing:
                waiting[request.key, request.sample_index] = row
                sent += 1
                yield request

        replies = Replies(sampler.sample(requests()))
        answers = ((waiting.pop((it.request.key, it.request.sample_index)), it) for it in replies)
        for request, result in self._judged(answers):
            store.add(request, result)
        if replies.refused and len(replies.refused) == sent and not store:
            raise DataError(
                f"step '{self.name}': '{model}' refuses every request, {sent} so far (first: "
                f"{replies.refused[0].reason}); expected it to refuse none but prompts that are too long"
            )
        for refused in replies.refused:
            store.add(refused.request, REFUSED)
        if failures := replies.failures:
            raise DataError(
                f"step '{self.name}': {len(failures)} of {sent - len(replies.refused)} requests to '{model}' were not "
                f"answered (first: {failures[0]}); the answers that came are kept: run the same command again to ask "
                "for the rest"
            )


def _key(row: Candidate) -> str:
    """Return the key under which a problem's results are stored; it changes with the problem's answer or tests."""
    return f"{row.id}-{hashlib.sha256(row.ground_truth.encode()).hexdigest()[:8]}"


def _identity(model: SampledModel) -> dict[str, Any]:
    """Return the settings that identify a model; those of its engines and requests are left out."""
    return model.model_dump(mode="json", include={"name", "hf", "dtype", "endpoint", "model"})
