"""What the steps that ask models share: the questions not answered yet are asked, each answer is kept as it comes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from or1_megatron.data.pipeline.recipe import DifficultyConfig, JudgesConfig, SampledModel
from or1_megatron.data.pipeline.records import Candidate, read_candidates
from or1_megatron.data.pipeline.results import ResultStore
from or1_megatron.data.rows import DataError
from or1_megatron.interfaces import Sampler
from or1_megatron.types import Answer, Ask, Sampling, Unanswered

OpenSampler = Callable[[SampledModel, Sampling, int], AbstractContextManager[Sampler]]
"""(model, how, longest prompt in tokens) to its engines or endpoint; they end when the context does."""

REFUSED = "refused"
"""A result: the model cannot be asked this at all, e.g. because the prompt is too long."""


class ModelStep:
    """A ``steps.Step`` that asks models. Their results stay in a folder of their own, by model and way of asking: only
    what a model has not answered yet is asked, and a killed or failed step goes on behind the last answer."""

    name: str

    def __init__(self, config: DifficultyConfig | JudgesConfig, results: Path, open_sampler: OpenSampler) -> None:
        self._results, self._open_sampler = results, open_sampler
        self._models = config.models
        self._longest_prompt = config.max_prompt_tokens
        self._sampling = Sampling(config.temperature, config.top_p, config.max_response_tokens)
        self._stores: dict[str, ResultStore] = {}

    def settings(self) -> Mapping[str, Any]:
        return {**self._asked_how(), "models": [identity(model) for model in self._models]}

    def prepare(self, shards: Sequence[Path]) -> None:
        """Ask every model what it has not answered yet. Raises DataError when requests failed."""
        for model in self._models:
            how = {**self._asked_how(), **identity(model)}
            store = self._stores[model.name] = ResultStore(self._results, model.name, how)
            opening = partial(self._open_sampler, model, self._sampling, self._longest_prompt)
            with _OpenedWhenAsked(opening) as sampler:
                self._ask(Asked(self.name, model.name, sampler, shards, store))

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def _asked_how(self) -> dict[str, Any]:
        """What a result depends on beside problem and model."""
        raise NotImplementedError

    def _ask(self, model: Asked) -> None:
        """Take the answers to what is missing, and keep their results."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Asked:
    """A model that a step asks about the candidates of ``shards``, and what is known of it."""

    step: str
    name: str
    sampler: Sampler
    shards: Sequence[Path]
    store: ResultStore

    def rows(self) -> Iterator[Candidate]:
        return (row for shard in self.shards for batch in read_candidates(shard) for row in batch)

    def answers(self, asks_of: Callable[[Candidate], list[Ask]], refused: Any) -> Iterator[tuple[Candidate, Answer]]:
        """Answers as they come. What the model refuses for good gets ``refused`` as its result.

        Raises DataError, behind the last answer, when other requests failed. A model that refuses everything says
        something of the request, not of the problems: then nothing is kept.
        """
        waiting: dict[str, tuple[Candidate, int]] = {}

        def asks() -> Iterator[Ask]:
            for row in self.rows():
                if found := asks_of(row):
                    waiting[found[0].key] = (row, len(found))
                yield from found

        answered, failures, refusals = 0, list[str](), list[Unanswered]()
        for reply in self.sampler.sample(asks()):
            row, count = waiting.pop(reply.ask.key)
            if count > 1:
                waiting[reply.ask.key] = (row, count - 1)
            if isinstance(reply, Answer):
                answered += 1
                yield row, reply
            elif reply.for_good:
                refusals.append(reply)
            else:
                failures.append(reply.reason)
        if refusals and not answered and not self.store:
            raise DataError(
                f"step '{self.step}': '{self.name}' refuses every request, {len(refusals)} so far (first: "
                f"{refusals[0].reason}); expected it to refuse none but prompts that are too long"
            )
        for refusal in refusals:
            self.store.add(refusal.ask.key, refusal.ask.sample, refused)
        if failures:
            raise DataError(
                f"step '{self.step}': {len(failures)} of {len(failures) + answered} requests to '{self.name}' were not "
                f"answered (first: {failures[0]}); the answers that came are kept: run the same command again to ask "
                "for the rest"
            )


class _OpenedWhenAsked:
    """A sampler that opens at the first question: where none is left, no engine starts."""

    def __init__(self, open_sampler: Callable[[], AbstractContextManager[Sampler]]) -> None:
        self._open_sampler = open_sampler
        self._opened = ExitStack()
        self._sampler: Sampler | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._opened.__exit__(*failure)

    def sample(self, asks: Iterable[Ask]) -> Iterator[Answer | Unanswered]:
        waiting = iter(asks)
        if (one := next(waiting, None)) is None:
            return
        if self._sampler is None:
            self._sampler = self._opened.enter_context(self._open_sampler())
        yield from self._sampler.sample(chain([one], waiting))


def result_key(row: Candidate) -> str:
    """Of a problem's results: another answer or other tests make it another problem."""
    return f"{row.id}-{hashlib.sha256(row.ground_truth.encode()).hexdigest()[:8]}"


def ask_seed(*parts: object) -> int:
    """In [0, 2**31), as every endpoint takes it; neighbouring parts give unrelated seeds."""
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def identity(model: SampledModel) -> dict[str, Any]:
    """What makes it another model: not how many engines or requests serve it."""
    return model.model_dump(mode="json", include={"name", "hf", "dtype", "endpoint", "model"})


def statuses(known: Mapping[int, Any], count: int) -> list[Any]:
    """The first ``count`` samples' results, in order."""
    return [known[sample] for sample in sorted(known)[:count]]
