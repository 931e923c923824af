"""What the steps that ask models share: the questions not answered yet are asked, each answer is kept as it comes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from or1_megatron.data.pipeline.recipe import SampledModel
from or1_megatron.data.pipeline.records import Candidate
from or1_megatron.data.pipeline.results import ResultStore
from or1_megatron.data.rows import DataError
from or1_megatron.interfaces import Sampler
from or1_megatron.types import Answer, Ask, Sampling, Unanswered

OpenSampler = Callable[[SampledModel, Sampling, int], AbstractContextManager[Sampler]]
"""(model, how, longest prompt in tokens) to its engines or endpoint; they end when the context does."""

REFUSED = "refused"
"""A result: the model cannot be asked this at all, e.g. because the prompt is too long."""


@dataclass(slots=True)
class Failures:
    """Questions that a model could have answered and did not: the first one's reason stands for all."""

    model: str
    answered: int = 0
    count: int = 0
    first: str = ""
    refused: list[Unanswered] = field(default_factory=list)

    def settle(self, step: str, store: ResultStore, refused: Any) -> None:
        """Keep as ``refused`` what was refused for good; raises DataError when other requests failed.

        A model that refuses everything says something of the request, not of the problems: then nothing is kept.
        """
        if self.refused and not store:
            raise DataError(
                f"step '{step}': '{self.model}' refuses every request, {len(self.refused)} so far (first: "
                f"{self.refused[0].reason}); expected it to refuse none but prompts that are too long"
            )
        for reply in self.refused:
            store.add(reply.ask.key, reply.ask.sample, refused)
        if self.count:
            raise DataError(
                f"step '{step}': {self.count} of {self.count + self.answered} requests to '{self.model}' were not "
                f"answered (first: {self.first}); the answers that came are kept: run the same command again to ask "
                "for the rest"
            )


@dataclass(slots=True)
class Questions:
    """The asks of many candidates, made one after another, and the candidates that still wait for an answer."""

    rows: Iterable[Candidate]
    asks_of: Callable[[Candidate], list[Ask]]
    waiting: dict[str, tuple[Candidate, int]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Ask]:
        for row in self.rows:
            asks = self.asks_of(row)
            if asks:
                self.waiting[asks[0].key] = (row, len(asks))
            yield from asks

    def answered(self, key: str) -> Candidate:
        row, count = self.waiting.pop(key)
        if count > 1:
            self.waiting[key] = (row, count - 1)
        return row


def replies(
    sampler: Sampler, questions: Questions, asks: Iterable[Ask], failures: Failures
) -> Iterator[tuple[Candidate, Answer]]:
    """Answers to ``asks``, made by ``questions``, as they come; the rest is in ``failures``."""
    for reply in sampler.sample(asks):
        row = questions.answered(reply.ask.key)
        if isinstance(reply, Answer):
            failures.answered += 1
            yield row, reply
        elif reply.for_good:
            failures.refused.append(reply)
        else:
            failures.count += 1
            failures.first = failures.first or reply.reason


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
