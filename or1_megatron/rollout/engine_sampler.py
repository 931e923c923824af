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
LINGER_S = 0.2  # answers come in bundles of so many seconds: a call costs as much as a dozen short responses
_AHEAD_S = 0.5  # an engine has that much more to do than it decodes at once
_PROMPTS_REMEMBERED = 4096

Tokenise = Callable[[tuple[Message, ...]], Int32Array]


class _Engine:
    """An engine's requests under way, and how many it shall have."""

    def __init__(self, handle: Any, index: int, max_concurrent: int) -> None:
        self.handle, self.index = handle, index
        self.under_way: dict[tuple[str, int], Ask] = {}
        self._decodes = max_concurrent
        self._least_ahead = self._ahead = max(1, max_concurrent // 8)
        self._answered, self._started_s = 0, time.monotonic()

    @property
    def room(self) -> int:
        """Requests that can be given to it: it decodes ``max_concurrent``, and its free places fill from the others."""
        return self._decodes + self._ahead - len(self.under_way)

    @property
    def short(self) -> bool:
        """Half of what was ahead has been used up: not with every answer, so that requests share a call."""
        return self.room > self._ahead // 2

    def answered(self, answers: int) -> None:
        """How much is to be ahead follows from the rate since the start: answers may come in bursts, hours apart."""
        self._answered += answers
        seconds = max(time.monotonic() - self._started_s, LINGER_S)
        self._ahead = max(self._least_ahead, int(self._answered / seconds * _AHEAD_S))


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
        self._prompt = lru_cache(_PROMPTS_REMEMBERED)(
            lambda key, messages: Prompt(Problem(key, "", "", messages, "", {}, key), tokenise(messages))
        )
        self._max_prompt_tokens = max_prompt_tokens
        self._max_concurrent = max_concurrent

    def sample(self, asks: Iterable[Ask]) -> Iterator[Answer | Unanswered]:
        waiting = iter(asks)
        engines = [_Engine(handle, index, self._max_concurrent) for index, handle in enumerate(self.engines)]
        harvests: dict[Any, _Engine] = {}
        exhausted = False
        answered_s = time.monotonic()
        while True:
            refused: list[Unanswered] = []
            if not exhausted and any(engine.short for engine in engines):
                exhausted = self._fill(waiting, engines, refused)
            yield from refused
            for engine in engines:
                if engine.under_way and engine not in harvests.values():
                    harvests[engine.handle.harvest.remote(_HARVEST_WAIT_S, LINGER_S)] = engine
            if not harvests:
                return
            done, _ = ray.wait(list(harvests), num_returns=1, timeout=self._timeout_s)
            if time.monotonic() - answered_s > self._timeout_s:
                waiting_for = ", ".join(
                    f"engine {engine.index}: {len(engine.under_way)}" for engine in engines if engine.under_way
                )
                raise EngineError(f"no answer in {self._timeout_s:g} s; requests under way: {waiting_for}")
            for call in done:
                engine = harvests.pop(call)
                completions = _harvested(call, engine.index).completions
                engine.answered(len(completions))
                for completion in completions:
                    ask = engine.under_way.pop((completion.problem_id, completion.sample_index), None)
                    answered_s = time.monotonic()
                    if ask is not None:  # else it belongs to a sampling that was broken off
                        yield Answer(ask, completion.text, completion.truncated, completion.token_ids.size)

    def _fill(self, waiting: Iterator[Ask], engines: Sequence[_Engine], refused: list[Unanswered]) -> bool:
        """Give every engine as much as it has room for, evenly; whether there is nothing left to give."""
        batches: dict[int, list[Request]] = {engine.index: [] for engine in engines}
        exhausted = False
        while (engine := max(engines, key=lambda one: one.room)).room > 0:
            ask = next(waiting, None)
            if ask is None:
                exhausted = True
                break
            prompt = self._prompt(ask.key, ask.messages)
            if (tokens := len(prompt.token_ids)) > self._max_prompt_tokens:
                reason = f"{tokens} prompt tokens, more than {self._max_prompt_tokens}"
                refused.append(Unanswered(ask, reason, for_good=True))
                continue
            engine.under_way[ask.key, ask.sample] = ask
            batches[engine.index].append(Request(prompt, ask.sample, self._sampling, ask.seed))
        calls = [
            (engine, engine.handle.submit.remote(pickle.dumps(batches[engine.index], protocol=5)))
            for engine in engines
            if batches[engine.index]
        ]
        for engine, call in calls:
            _result(call, engine.index, "take requests")
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
