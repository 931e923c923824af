"""A clock in the place of an engine.

An engine decodes one token of each of its n running responses per iteration. An iteration takes

    fixed + n * per response + max(reading the weights, n * their products) + C * reading a token's keys and values

seconds, where C are all tokens that the engine holds. Between two events n is constant and C grows by n, so the time of
m iterations is a closed form, and the engine moves from event to event: a response ends, requests arrive, the KV cache
is full. Then the response that was admitted last is preempted; it is computed again before it goes on. An engine admits
waiting requests in order while it has places and KV cache; reading a prompt or a preempted response stops its decoding
for that time. Whole blocks of a prompt that the engine has read with its present weights are not read again. What new
weights read of responses in flight is left out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from or1_megatron.types import Request, VersionSpan

PARTS: Final = ("weights", "products", "keys and values", "per response", "per iteration", "prompts")
"""What an engine's time is spent on."""


@dataclass(frozen=True, slots=True)
class EngineClock:
    """The times and limits of one engine. Seconds, tokens."""

    max_running: int
    """Responses that it decodes at once."""
    fixed_s: float = 0.0
    """An iteration, whatever it computes."""
    response_s: float = 0.0
    """A response's share of an iteration, beside products and attention."""
    weights_s: float = 0.0
    """Reading all weights once."""
    product_s: float = 0.0
    """The products of one token."""
    token_s: float = 0.0
    """Reading one token's keys and values."""
    prompt_token_s: float = 0.0
    """Reading a prompt: per token."""
    prompt_pair_s: float = 0.0
    """Reading a prompt of p tokens: p * p times this."""
    kv_tokens: int = 1 << 60
    """Tokens that the KV cache holds."""
    block_tokens: int = 16
    """Tokens of a block of it: what is whole in a prompt's blocks is not read again."""

    def constant_s(self, running: int) -> float:
        """Return an iteration's seconds without attention."""
        return self.fixed_s + running * self.response_s + max(self.weights_s, running * self.product_s)

    def iterations_s(self, running: int, tokens: int, count: int) -> float:
        """Return the seconds of ``count`` iterations of ``running`` responses that hold ``tokens`` before the first."""
        grown = count * tokens + running * count * (count - 1) // 2
        return count * self.constant_s(running) + grown * self.token_s

    def prompt_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds of reading ``tokens``, the first ``cached`` of which are in the cache."""
        return (tokens - cached) * self.prompt_token_s + (tokens * tokens - cached * cached) * self.prompt_pair_s

    def cached(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt that was read before are in the cache: whole blocks, but not the last
        token, which is always computed."""
        return (prompt_tokens - 1) // self.block_tokens * self.block_tokens


@dataclass(slots=True)
class Asked:
    """A request, the length of its response in tokens, and what is known of it since it was admitted first."""

    request: Request
    length: int
    done: int = 0
    """Tokens decoded before it was admitted last."""
    started_s: float | None = None
    versions: list[VersionSpan] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    asked: Asked
    began: int
    """The engine's iteration count when it was admitted."""

    @property
    def finish(self) -> int:
        """The count at which it ends."""
        return self.began + self.asked.length - self.asked.done

    def decoded(self, iteration: int) -> int:
        return self.asked.done + iteration - self.began


class SimulatedEngine:
    """One engine at an iteration boundary, which ``now_s`` is the time of."""

    def __init__(self, clock: EngineClock) -> None:
        self.clock = clock
        self.now_s = 0.0
        self.version = 0
        self.iteration = self.preempted = 0
        self.busy: list[tuple[float, float]] = []
        """(start, end) of the periods in which it worked."""
        self.parts = [0.0] * len(PARTS)
        """Seconds by PARTS."""
        self.waiting: deque[Asked] = deque()
        self.running: dict[int, _Running] = {}  # by seed, in the order of admission
        self._tokens = 0  # that the KV cache holds
        self._ends: list[tuple[int, int]] = []  # heap of (finish, seed); may hold stale entries
        self._read: set[str] = set()  # problems whose prompts are in the prefix cache
        self._unwanted: set[int] = set()  # seeds to be dropped at the next boundary
        self._pause: tuple[float, int] | None = None  # (seconds, version) of a handoff, for the next boundary

    @property
    def has_room(self) -> bool:
        """Whether a further request would be admitted at once, as far as places go."""
        return not self.waiting and len(self.running) < self.clock.max_running

    def due_s(self) -> float:
        """Return when its next event is; it must have running responses."""
        return self.now_s + self.clock.iterations_s(len(self.running), self._tokens, self._to_event())

    def busy_until(self, now_s: float) -> list[tuple[float, float]]:
        """Return ``busy``, with what it has worked since its last event up to ``now_s``."""
        return [*self.busy, (self.now_s, now_s)] if self.running and self.now_s < now_s else self.busy

    def to_event(self) -> list[tuple[Asked, tuple[VersionSpan, ...]]]:
        """Move to the next event; return what has ended there, with the versions of its tokens."""
        self._advance(self._to_event())
        return self.settle()

    def settle(self) -> list[tuple[Asked, tuple[VersionSpan, ...]]]:
        """Drop what is given up, take off and return what has ended, make room if the cache is full, and pause."""
        for seed in self._unwanted & self.running.keys():
            self._drop(seed)
        self._unwanted.clear()
        ended = []
        while self._ends and self._ends[0][0] <= self.iteration:
            finish, seed = heapq.heappop(self._ends)
            if not self._stale(finish, seed):
                asked = self._drop(seed)
                ended.append((asked, tuple(asked.versions)))
        while self.running and self._tokens + len(self.running) > self.clock.kv_tokens:
            self.waiting.appendleft(self._drop(next(reversed(self.running))))
            self.preempted += 1
        if self._pause is not None:
            seconds, version = self._pause
            self._pause = None
            self._take_over(seconds, version)
        return ended

    def advance_to(self, moment_s: float) -> bool:
        """Move to the first iteration boundary that is not before ``moment_s``; an idle engine just waits.

        Return False, and do not move, if the engine's next event comes no later: it will look at its requests then.
        """
        if not self.running:
            self.now_s = max(self.now_s, moment_s)
            return True
        low, high, running = 0, self._to_event(), len(self.running)
        while low < high:
            middle = (low + high) // 2
            if self.now_s + self.clock.iterations_s(running, self._tokens, middle) >= moment_s:
                high = middle
            else:
                low = middle + 1
        if low == self._to_event():
            return False
        self._advance(low)
        return True

    def submit(self, asked: Iterable[Asked]) -> None:
        """Take requests; ``admit`` starts them."""
        self.waiting.extend(asked)

    def abort(self, seeds: Iterable[int]) -> None:
        """Take these off: those that it decodes at the next boundary, see ``settle``."""
        gone = set(seeds)
        self.waiting = deque(asked for asked in self.waiting if asked.request.seed not in gone)
        self._unwanted |= gone & self.running.keys()

    def pause(self, seconds: float, version: int, now_s: float) -> None:
        """Take over weights at the next boundary: nothing is decoded meanwhile, and what is under way goes on."""
        if self.advance_to(now_s):
            self._take_over(seconds, version)
        else:
            self._pause = (seconds + (self._pause[0] if self._pause else 0.0), version)

    def admit(self) -> None:
        """Start waiting requests while there are places and cache for them."""
        while self.waiting and len(self.running) < self.clock.max_running:
            asked = self.waiting[0]
            prompt = asked.request.prompt
            held = len(prompt.token_ids) + asked.done
            if self._tokens + held + len(self.running) + 1 > self.clock.kv_tokens and self.running:
                return
            self.waiting.popleft()
            if asked.started_s is None:
                asked.started_s, asked.versions = self.now_s, [VersionSpan(self.version, 0)]
            again = not asked.done and prompt.problem.id in self._read
            self._read.add(prompt.problem.id)
            spent = self.clock.prompt_s(held, self.clock.cached(held) if again else 0)
            self._work(spent)
            self.parts[5] += spent
            started = self.running[asked.request.seed] = _Running(asked, self.iteration)
            heapq.heappush(self._ends, (started.finish, asked.request.seed))
            self._tokens += held

    def _to_event(self) -> int:
        """Return the iterations up to the next end of a response or a full cache; 0: it is full now."""
        while self._ends and self._stale(*self._ends[0]):
            heapq.heappop(self._ends)
        first = self._ends[0][0] - self.iteration
        return min(first, (self.clock.kv_tokens - self._tokens) // len(self.running))

    def _stale(self, finish: int, seed: int) -> bool:
        running = self.running.get(seed)
        return running is None or running.finish != finish

    def _advance(self, count: int) -> None:
        running, clock = len(self.running), self.clock
        spent = clock.iterations_s(running, self._tokens, count)
        bound_by_weights = clock.weights_s >= running * clock.product_s
        self.parts[0 if bound_by_weights else 1] += count * max(clock.weights_s, running * clock.product_s)
        self.parts[2] += spent - count * clock.constant_s(running)
        self.parts[3] += count * running * clock.response_s
        self.parts[4] += count * clock.fixed_s
        self._work(spent)
        self.iteration += count
        self._tokens += count * running

    def _work(self, seconds: float) -> None:
        if seconds:
            start_s = self.now_s
            if self.busy and self.busy[-1][1] == start_s:
                start_s = self.busy.pop()[0]
            self.now_s += seconds
            self.busy.append((start_s, self.now_s))

    def _drop(self, seed: int) -> Asked:
        gone = self.running.pop(seed)
        gone.asked.done = gone.decoded(self.iteration)
        self._tokens -= len(gone.asked.request.prompt.token_ids) + gone.asked.done
        return gone.asked

    def _take_over(self, seconds: float, version: int) -> None:
        self.now_s += seconds
        self.version = version
        self._read.clear()
        begun = [(one.asked, one.decoded(self.iteration)) for one in self.running.values()]
        begun += [(asked, asked.done) for asked in self.waiting if asked.started_s is not None]  # preempted
        for asked, done in begun:
            asked.versions = [*(old for old in asked.versions if old.first_token < done), VersionSpan(version, done)]
