"""Engines of our own as a ``interfaces.Sampler``: each is kept just full, and who is free takes the next question."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from or1_megatron.rollout.engine_thread import Harvest
from or1_megatron.rollout.pool import EngineError
from or1_megatron.types import Answer, Ask, Int32Array, Message, Problem, Prompt, Request, Sampling, Unanswered

_HARVEST_WAIT_S = 5.0
_PROMPTS_REMEMBERED = 4096

Tokenise = Callable[[tuple[Message, ...]], Int32Array]


class EngineSampler:
    """Over ``pool.EngineActor`` handles. Raises EngineError when an engine fails or dies."""

    def __init__(
        self,
        engines: Sequence[Any],
        max_concurrent: int,
        tokenise: Tokenise,
        sampling: Sampling,
        max_prompt_tokens: int,
        timeout_s: float = 7200.0,
    ) -> None:
        """``timeout_s``: without a single answer in this time the engines count as hung."""
        self._timeout_s = timeout_s
        self.engines, self._sampling = list(engines), sampling
        # The samples of a problem share its prompt, and come one round of all problems after another.
        self._tokenise = lru_cache(_PROMPTS_REMEMBERED)(tokenise)
        self._max_prompt_tokens = max_prompt_tokens
        # A little more than an engine decodes at once, so that its free places fill without asking us; more only when
        # half of that has been used up, so that several requests share what a call costs.
        spare = max(1, max_concurrent // 8)
        self._room, self._enough = max_concurrent + spare, max_concurrent + spare // 2

    def sample(self, asks: Iterable[Ask]) -> Iterator[Answer | Unanswered]:
        waiting = iter(asks)
        under_way: list[dict[tuple[str, int], Ask]] = [{} for _ in self.engines]
        harvests: dict[Any, int] = {}
        exhausted = False
        answered_s = time.monotonic()
        while True:
            refused: list[Unanswered] = []
            if not exhausted and min(map(len, under_way)) <= self._enough:
                exhausted = self._fill(waiting, under_way, refused)
            yield from refused
            for index, asked in enumerate(under_way):
                if asked and index not in harvests.values():
                    harvests[self.engines[index].harvest.remote(_HARVEST_WAIT_S)] = index
            if not harvests:
                return
            done, _ = ray.wait(list(harvests), num_returns=1, timeout=self._timeout_s)
            if time.monotonic() - answered_s > self._timeout_s:
                waiting_for = ", ".join(
                    f"engine {index}: {len(asked)}" for index, asked in enumerate(under_way) if asked
                )
                raise EngineError(f"no answer in {self._timeout_s:g} s; requests under way: {waiting_for}")
            for call in done:
                index = harvests.pop(call)
                for completion in _harvested(call, index).completions:
                    ask = under_way[index].pop((completion.problem_id, completion.sample_index), None)
                    answered_s = time.monotonic()
                    if ask is not None:  # else it belongs to a sampling that was broken off
                        yield Answer(ask, completion.text, completion.truncated, completion.token_ids.size)

    def _fill(
        self, waiting: Iterator[Ask], under_way: Sequence[dict[tuple[str, int], Ask]], refused: list[Unanswered]
    ) -> bool:
        """Give every engine as much as it has room for, evenly; whether there is nothing left to give."""
        batches: list[list[Request]] = [[] for _ in self.engines]
        exhausted = False
        while min(map(len, under_way)) < self._room:
            ask = next(waiting, None)
            if ask is None:
                exhausted = True
                break
            ids = self._tokenise(ask.messages)
            if len(ids) > self._max_prompt_tokens:
                refused.append(
                    Unanswered(ask, f"{len(ids)} prompt tokens, more than {self._max_prompt_tokens}", for_good=True)
                )
                continue
            index = min(range(len(self.engines)), key=lambda engine: len(under_way[engine]))
            under_way[index][ask.key, ask.sample] = ask
            problem = Problem(ask.key, "", "", ask.messages, "", {}, ask.key)
            batches[index].append(Request(Prompt(problem, ids), ask.sample, self._sampling, ask.seed))
        calls = [
            (index, self.engines[index].submit.remote(pickle.dumps(batch, protocol=5)))
            for index, batch in enumerate(batches)
            if batch
        ]
        for index, call in calls:
            _result(call, index, "take requests")
        return exhausted


def _harvested(call: Any, index: int) -> Harvest:
    harvest: Harvest = pickle.loads(_result(call, index, "sample"))
    return harvest


def _result(call: Any, index: int, what: str) -> Any:
    try:
        return ray.get(call)
    except RayTaskError as error:
        raise EngineError(f"engine {index} did not {what}: {error.cause}") from error
    except RayActorError as error:
        raise EngineError(f"engine {index} died while it should {what}: {error}") from error
