"""Simulates the vLLM engines of a run for ``or1 plan``: when each response ends, from lengths and predicted times.

An engine decodes one token of each of its n running responses per iteration. An iteration takes

    fixed + n * per response + max(reading the weights, n * products of a token) + C * reading a token's keys and values

seconds, where C is the number of tokens in the KV cache. Until the next response ends, n is constant and C grows by n
per iteration, so the time of m iterations is a closed form. Requests go in order to the engine with the fewest
responses among the engines with a free slot and with KV cache for the prompt and half of the response. (vLLM admits
what fits at the moment, and preempts.) Responses continue after a handoff; the time to prefill them anew is left out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from or1_megatron.types import Int64Array

PARTS: Final = ("weights", "products", "keys and values", "per response", "per iteration", "prompts")
"""The parts into which an engine's time is split."""


@dataclass(frozen=True, slots=True)
class EngineClock:
    """Predicted times and limits of one engine, in seconds and tokens."""

    max_running: int
    """Largest number of responses that the engine decodes at once."""
    fixed_s: float = 0.0
    """Constant part of an iteration's time."""
    response_s: float = 0.0
    """Time that each response adds to an iteration, without matrix products and attention."""
    weights_s: float = 0.0
    """Time to read all weights once."""
    product_s: float = 0.0
    """Time of one token's matrix products."""
    token_s: float = 0.0
    """Time to read one token's keys and values."""
    prompt_token_s: float = 0.0
    """Prefill time per token of a prompt."""
    prompt_pair_s: float = 0.0
    """Prefill time of attention per pair of tokens; a prompt of p tokens has p * p pairs."""
    kv_tokens: int = 1 << 60
    """Number of tokens for which the KV cache has room."""

    def parts_s(self, running: int, tokens: float, count: float) -> NDArray[np.float64]:
        """Return the seconds, by PARTS, of ``count`` iterations of ``running`` responses. Together the responses hold
        ``tokens`` tokens before the first iteration."""
        products = running * self.product_s
        read = (count * tokens + running * count * (count - 1) / 2) * self.token_s
        by_weights = self.weights_s >= products
        large = max(self.weights_s, products) * count
        return np.array(
            [large * by_weights, large * (not by_weights), read, count * running * self.response_s,
             count * self.fixed_s, 0.0]
        )  # fmt: skip

    def iterations_in(self, running: int, tokens: float, seconds: float) -> float:
        """Return how many iterations an engine makes in ``seconds``: the inverse of the sum of ``parts_s``."""
        growth = running * self.token_s / 2
        first = self.parts_s(running, tokens, 1.0).sum() - growth
        return float(2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)))

    def prompt_s(self, tokens: int) -> float:
        return tokens * self.prompt_token_s + tokens * tokens * self.prompt_pair_s


class _PlannedResponse(NamedTuple):
    ticket: int
    prompt: int
    length: int
    reading_s: float

    @property
    def reserved(self) -> int:
        return self.prompt + self.length // 2


class _Engine:
    """One simulated engine. Its clock ``now_s`` runs ahead of the other engines' clocks after it has read prompts."""

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self.now_s, self.due_s = 0.0, math.inf
        self.running = self._reserved = 0
        self._held = self._iteration = 0.0
        self._ends: list[tuple[float, _PlannedResponse]] = []  # heap of (iteration at which it ends, request)
        self.parts_s = np.zeros(len(PARTS))

    def advance(self, moment_s: float) -> None:
        """Decode until time ``moment_s``. No response may end before that time."""
        if self.running and moment_s > self.now_s:
            self._decode(self._clock.iterations_in(self.running, self._held, moment_s - self.now_s))
        self.now_s = max(self.now_s, moment_s)
        self._plan()

    def finish(self) -> list[int]:
        """Decode until the next responses end; return the tickets of their rollouts."""
        self._decode(self._ends[0][0] - self._iteration)
        self.now_s, ended = self.due_s, []
        while self._ends and self._ends[0][0] <= self._iteration + 1e-6:
            _, asked = heapq.heappop(self._ends)
            self.running -= 1
            self._reserved -= asked.reserved
            self._held -= asked.prompt + asked.length
            ended.append(asked.ticket)
        self._plan()
        return ended

    def admits(self, asked: _PlannedResponse) -> bool:
        """Return whether a slot and KV cache are free for a request; an idle engine admits any request."""
        room = self._reserved + asked.reserved <= self._clock.kv_tokens
        return self.running < self._clock.max_running and (room or not self.running)

    def admit(self, asked: _PlannedResponse, moment_s: float) -> None:
        self.advance(moment_s)
        self.now_s += asked.reading_s
        self.parts_s[-1] += asked.reading_s
        self.running += 1
        self._reserved += asked.reserved
        self._held += asked.prompt
        heapq.heappush(self._ends, (self._iteration + asked.length, asked))
        self._plan()

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        self._plan()

    def _decode(self, count: float) -> None:
        self.parts_s += self._clock.parts_s(self.running, self._held, count)
        self._iteration += count
        self._held += count * self.running

    def _plan(self) -> None:
        self.due_s = math.inf
        if self.running:
            count = self._ends[0][0] - self._iteration
            self.due_s = self.now_s + float(self._clock.parts_s(self.running, self._held, count).sum())


class PlannedEngines:
    """Simulates a run's engines and verifiers on one clock, which only ``wait``, ``spend`` and ``pause`` move."""

    def __init__(self, clock: EngineClock, engines: int, verifiers: int = 1, verdict_s: float = 0.0) -> None:
        self.now_s = 0.0
        self._clock, self._verdict_s = clock, verdict_s
        self._engines = [_Engine(clock) for _ in range(engines)]
        self._waiting: deque[_PlannedResponse] = deque()
        self._left: list[int] = []  # by ticket, responses that have not ended
        self._judged_s: list[float] = []  # by ticket, when the last verdict comes
        self._free_s = [0.0] * verifiers  # heap of when each verifier is free

    def request(self, prompt_tokens: Int64Array, response_tokens: Int64Array, group_size: int) -> int:
        """Queue the requests of a rollout whose responses have these lengths; return the rollout's ticket.

        Shapes: [prompts] and [prompts * group_size]. An engine reads a prompt once, for all the responses that it makes
        to this prompt.
        """
        ticket, share = len(self._left), min(len(self._engines), group_size) / group_size
        self._left.append(response_tokens.size)
        self._judged_s.append(self.now_s)
        prompts = np.repeat(prompt_tokens, group_size).tolist()
        self._waiting.extend(
            _PlannedResponse(ticket, prompt, length, share * self._clock.prompt_s(prompt))
            for prompt, length in zip(prompts, response_tokens.tolist(), strict=True)
        )
        self._deal(self._engines)
        return ticket

    def wait(self, ticket: int) -> float:
        """Advance to the end of a rollout's last response; return the seconds from that end to the last verdict."""
        self._run(ticket, math.inf)
        return max(0.0, self._judged_s[ticket] - self.now_s)

    def spend(self, seconds: float) -> None:
        """Advance the clock by ``seconds`` in which engines decode."""
        self._run(None, self.now_s + seconds)

    def pause(self, seconds: float) -> None:
        """Advance the clock by ``seconds`` in which no engine decodes."""
        for engine in self._engines:
            engine.advance(self.now_s)
            engine.pause(seconds)
        self.spend(seconds)

    def parts_s(self) -> NDArray[np.float64]:
        """Return the seconds that all engines together have spent up to now, by PARTS."""
        for engine in self._engines:
            engine.advance(self.now_s)
        return np.sum([engine.parts_s for engine in self._engines], axis=0)

    def _run(self, ticket: int | None, end_s: float) -> None:
        while ticket is None or self._left[ticket]:
            engine = min(self._engines, key=lambda one: one.due_s)
            if engine.due_s >= end_s:
                self.now_s = end_s
                return
            self.now_s = engine.due_s
            for ended in engine.finish():
                self._left[ended] -= 1
                judged_s = max(heapq.heappop(self._free_s), self.now_s) + self._verdict_s
                heapq.heappush(self._free_s, judged_s)
                self._judged_s[ended] = judged_s
            self._deal([engine])

    def _deal(self, engines: Iterable[_Engine]) -> None:
        """Give each waiting request, in order, to the engine with the fewest responses, until no engine admits more."""
        emptiest = [(engine.running, index, engine) for index, engine in enumerate(engines)]
        heapq.heapify(emptiest)
        while self._waiting and emptiest:
            _, index, engine = heapq.heappop(emptiest)
            if engine.admits(self._waiting[0]):
                engine.admit(self._waiting.popleft(), self.now_s)
                heapq.heappush(emptiest, (engine.running, index, engine))
