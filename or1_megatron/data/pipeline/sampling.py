"""The part that steps which sample models share: send the missing requests, store each result as it comes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from or1_megatron.data.chat import Replies
from or1_megatron.data.pipeline.recipe import DifficultyConfig, JudgesConfig, SampledModel
from or1_megatron.data.pipeline.records import Candidate, read_candidates
from or1_megatron.data.pipeline.results import ResultStore
from or1_megatron.data.pipeline.steps import PipelineStep
from or1_megatron.interfaces import Sampler
from or1_megatron.types import ChatCompletion, ChatRequest, Sampling
from or1_verify.problems.rows import DataError

M = TypeVar("M", bound=DifficultyConfig | JudgesConfig)
OpenSampler = Callable[[SampledModel, Sampling, int], AbstractContextManager[Sampler]]
"""(model, sampling, longest prompt in tokens) to a sampler; its engines end with the context."""

REFUSED = "refused"
"""A result: the model refuses the request for good, e.g. because the prompt is too long."""


class ModelStep(PipelineStep[M]):
    """Base of the steps that sample models.

    Results lie in a folder of their own, by model and request settings: only missing responses are sampled, and a
    killed or failed step resumes after the last stored result.
    """

    def __init__(self, config: M, results: Path, open_sampler: OpenSampler) -> None:
        super().__init__(config)
        self._results, self._open_sampler = results, open_sampler
        self._sampling = Sampling(config.temperature, config.top_p, config.max_response_tokens)
        self._stores: dict[str, ResultStore] = {}

    def settings(self) -> Mapping[str, Any]:
        return {**self._request_settings(), "models": [identity(model) for model in self._config.models]}

    def prepare(self, shards: Sequence[Path]) -> None:
        """Sample what is missing of every model. Raises DataError when requests failed."""
        for model in self._config.models:
            self._prepare_model(model, shards)

    def _prepare_model(self, model: SampledModel, shards: Sequence[Path]) -> None:
        request_settings = {**self._request_settings(), **identity(model)}
        store = self._stores[model.name] = ResultStore(self._results, model.name, request_settings)
        with ExitStack() as opened:
            opening = partial(self._open_sampler, model, self._sampling, self._config.max_prompt_tokens)
            sampler = cache(lambda: opened.enter_context(opening()))
            self._sample_missing(ModelRun(self.name, model.name, sampler, shards, store))

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def _request_settings(self) -> dict[str, Any]:
        """Return what a result depends on beside problem and model."""
        raise NotImplementedError

    def _sample_missing(self, model: ModelRun) -> None:
        """Sample the missing responses and store their results."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One model in a step: its sampler, the candidates, and the results so far."""

    step: str
    name: str
    sampler: Callable[[], Sampler]
    """Opens the sampler at the first call: where nothing is missing, no engine starts."""
    shards: Sequence[Path]
    store: ResultStore

    def rows(self) -> Iterator[Candidate]:
        return (row for shard in self.shards for batch in read_candidates(shard) for row in batch)

    def completions(
        self, requests_of: Callable[[Candidate], list[ChatRequest]], refused: Any
    ) -> Iterator[tuple[Candidate, ChatCompletion]]:
        """Yield completions as they come. A request that the model refuses for good gets ``refused`` as its result.

        Raises DataError, after the last completion, when other requests failed. When the model refuses everything, the
        requests are wrong and not the problems: then nothing is stored.
        """
        waiting: dict[str, tuple[Candidate, int]] = {}

        def requests() -> Iterator[ChatRequest]:
            for row in self.rows():
                if found := requests_of(row):
                    waiting[found[0].key] = (row, len(found))
                yield from found

        unsent = requests()
        if (first := next(unsent, None)) is None:
            return
        replies, completed = Replies(self.sampler().sample(chain([first], unsent))), 0
        for completion in replies:
            row, count = waiting.pop(completion.request.key)
            if count > 1:
                waiting[completion.request.key] = (row, count - 1)
            completed += 1
            yield row, completion
        if replies.refused and not completed and not self.store:
            raise DataError(
                f"step '{self.step}': '{self.name}' refuses every request, {len(replies.refused)} so far (first: "
                f"{replies.refused[0].reason}); expected it to refuse none but prompts that are too long"
            )
        for failed in replies.refused:
            self.store.add(failed.request.key, failed.request.sample_index, refused)
        if failures := replies.failures:
            raise DataError(
                f"step '{self.step}': {len(failures)} of {len(failures) + completed} requests to '{self.name}' were "
                f"not answered (first: {failures[0]}); the answers that came are kept: run the same command again to "
                "ask for the rest"
            )


def result_key(row: Candidate) -> str:
    """Return the key of a problem's results: another answer or other tests make it another problem."""
    return f"{row.id}-{hashlib.sha256(row.ground_truth.encode()).hexdigest()[:8]}"


def identity(model: SampledModel) -> dict[str, Any]:
    """Return what makes it another model: not how many engines or requests serve it."""
    return model.model_dump(mode="json", include={"name", "hf", "dtype", "endpoint", "model"})


def statuses(known: Mapping[int, Any], count: int) -> list[Any]:
    """Return the results of the first ``count`` samples, in order."""
    return [known[sample] for sample in sorted(known)[:count]]
