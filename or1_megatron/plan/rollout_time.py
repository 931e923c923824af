"""The time of a roll-out: a discrete-event model in which clocks stand for engines and verifiers.

An engine decodes one token of each of its n running responses per iteration. An iteration takes

    fixed + n * per response + max(reading the weights, n * their products) + C * reading a token's keys and values

seconds, where C are all tokens that the engine holds. Between two events n is constant and C grows by n, so the time of
m iterations is a closed form, and the model moves from event to event: a response ends, requests arrive, the KV cache
is full. Then the response that was admitted last is preempted; it is computed again before it goes on. An engine admits
waiting requests in order while it has places and KV cache; reading a prompt or a preempted response stops its decoding
for that time. A prompt that the engine has read is not read again. Verifiers judge beside decoding, first come first
served.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from or1_megatron.plan.requests import Requests
from or1_megatron.types import Int64Array

PARTS = ("weights", "products", "keys and values", "per response", "per iteration", "prompts")
"""What an engine's time is spent on."""


@dataclass(frozen=True, slots=True)
class EngineClock:
    """The times and limits of one engine. Seconds, tokens."""

    fixed_s: float
    """An iteration, whatever it computes."""
    response_s: float
    """A response's share of an iteration, beside products and attention."""
    weights_s: float
    """Reading all weights once."""
    product_s: float
    """The products of one token."""
    token_s: float
    """Reading one token's keys and values."""
    prompt_token_s: float
    """Reading a prompt: per token."""
    prompt_pair_s: float
    """Reading a prompt of p tokens: p * p times this."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    max_running: int

    def constant_s(self, running: int) -> float:
        """Return an iteration's seconds without attention."""
        return self.fixed_s + running * self.response_s + max(self.weights_s, running * self.product_s)

    def iterations_s(self, running: int, tokens: int, count: int) -> float:
        """Return the seconds of ``count`` iterations of ``running`` responses that hold ``tokens`` before the first."""
        grown = count * tokens + running * count * (count - 1) // 2
        return count * self.constant_s(running) + grown * self.token_s

    def prompt_s(self, tokens: int) -> float:
        return tokens * self.prompt_token_s + tokens * tokens * self.prompt_pair_s


@dataclass(frozen=True, slots=True)
class Workload:
    """What a roll-out samples. Requests are numbered group by group."""

    prompt_tokens: Int64Array  # [prompts]
    response_tokens: Int64Array  # [prompts * group_size]
    group_size: int
    kept: Sequence[bool] | None = None
    """With refill: whether each prompt's group is kept."""
    wanted: int = 0
    """With refill: the groups to keep."""


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """How a roll-out went. Seconds since its start."""

    decoded_s: float
    """The last response was decoded (with refill: the result was complete)."""
    judged_s: float
    """The last verdict came."""
    finished_s: np.ndarray  # [requests]; infinity for those that were given up
    engine_s: np.ndarray  # [engines], when each had its last response
    busy_s: np.ndarray  # [engines]
    parts_s: dict[str, float]
    """Engine seconds by PARTS, of all engines."""
    iterations: int
    preempted: int
    prompts: int
    """That make up the result."""

    @property
    def utilisation(self) -> float:
        """Share of the roll-out in which an engine decodes, mean over engines."""
        return float(self.busy_s.mean() / self.decoded_s) if self.decoded_s else 0.0


@dataclass(slots=True)
class _Running:
    finish: int
    """The engine's iteration count at which it ends."""
    tokens_at_start: int
    began: int


@dataclass
class _Engine:
    """One engine at an iteration boundary."""

    clock: EngineClock
    workload: Workload
    now_s: float = 0.0
    iteration: int = 0
    tokens: int = 0
    running: dict[int, _Running] = field(default_factory=dict)  # by request, in the order of admission
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (finish, request); may hold stale entries
    waiting: deque[int] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)  # of preempted requests: response tokens still to decode
    read: set[int] = field(default_factory=set)  # prompts in the prefix cache
    unwanted: set[int] = field(default_factory=set)  # to be dropped at the next boundary
    busy_s: float = 0.0
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    preempted: int = 0

    def to_event(self) -> int:
        """Return the iterations up to the next end of a response or a full cache; 0: it is full now."""
        while self.ends and self._stale(*self.ends[0]):
            heapq.heappop(self.ends)
        first = self.ends[0][0] - self.iteration
        return min(first, (self.clock.kv_tokens - self.tokens) // len(self.running))

    def _stale(self, finish: int, request: int) -> bool:
        found = self.running.get(request)
        return found is None or found.finish != finish

    def due_s(self) -> float:
        return self.now_s + self.clock.iterations_s(len(self.running), self.tokens, self.to_event())

    def advance(self, count: int) -> None:
        running, clock = len(self.running), self.clock
        spent = clock.iterations_s(running, self.tokens, count)
        constant = count * clock.constant_s(running)
        bound_by_weights = clock.weights_s >= running * clock.product_s
        self.parts[0 if bound_by_weights else 1] += count * max(clock.weights_s, running * clock.product_s)
        self.parts[2] += spent - constant
        self.parts[3] += count * running * clock.response_s
        self.parts[4] += count * clock.fixed_s
        self.now_s += spent
        self.busy_s += spent
        self.iteration += count
        self.tokens += count * running

    def advance_to(self, moment_s: float) -> bool:
        """Move to the first iteration boundary that is not before ``moment_s``; an idle engine just waits.

        Return False, and do not move, if the engine's next event comes no later: it will look at its requests then.
        """
        if not self.running:
            self.now_s = max(self.now_s, moment_s)
            return True
        low, high, running = 0, self.to_event(), len(self.running)
        while low < high:
            middle = (low + high) // 2
            if self.now_s + self.clock.iterations_s(running, self.tokens, middle) >= moment_s:
                high = middle
            else:
                low = middle + 1
        if low == self.to_event():
            return False
        self.advance(low)
        return True

    def take_ended(self) -> list[int]:
        """Remove and return the responses that end at this boundary; then make room if the cache is full."""
        ended = []
        while self.ends and self.ends[0][0] <= self.iteration:
            finish, request = heapq.heappop(self.ends)
            if not self._stale(finish, request):
                self._drop(request)
                ended.append(request)
        while self.running and self.tokens + len(self.running) > self.clock.kv_tokens:
            request = next(reversed(self.running))
            self.left[request] = self.running[request].finish - self.iteration
            self._drop(request)
            self.waiting.appendleft(request)
            self.preempted += 1
        return ended

    def _drop(self, request: int) -> None:
        gone = self.running.pop(request)
        self.tokens -= gone.tokens_at_start + self.iteration - gone.began

    def give_up(self) -> None:
        """Drop what is not wanted any more."""
        if self.unwanted:
            for request in self.unwanted & self.running.keys():
                self._drop(request)
            self.waiting = deque(request for request in self.waiting if request not in self.unwanted)
            self.unwanted.clear()

    def admit(self) -> None:
        """Start waiting requests while there are places and cache for them."""
        while self.waiting and len(self.running) < self.clock.max_running:
            request = self.waiting[0]
            prompt = request // self.workload.group_size
            whole = int(self.workload.response_tokens[request])
            left = self.left.get(request, whole)
            held = int(self.workload.prompt_tokens[prompt]) + whole - left
            if self.tokens + held + len(self.running) + 1 > self.clock.kv_tokens and self.running:
                return
            self.waiting.popleft()
            if left < whole or prompt not in self.read:
                self.read.add(prompt)
                spent = self.clock.prompt_s(held)
                self.now_s += spent
                self.busy_s += spent
                self.parts[5] += spent
            self.running[request] = _Running(self.iteration + left, held, self.iteration)
            heapq.heappush(self.ends, (self.iteration + left, request))
            self.tokens += held

    def clear(self) -> None:
        self.running.clear()
        self.ends.clear()
        self.waiting.clear()
        self.tokens = 0


_VERDICT = -1


def simulate(workload: Workload, clock: EngineClock, engines: int, verifiers: int, verdict_s: float) -> RolloutTime:
    """Run the model. Every response must have 1 token or more, and fit the KV cache together with its prompt."""
    return _Simulation(workload, clock, engines, verifiers, verdict_s).run()


class _Simulation:
    def __init__(self, workload: Workload, clock: EngineClock, engines: int, verifiers: int, verdict_s: float) -> None:
        self.workload, self.verdict_s = workload, verdict_s
        self.engines = [_Engine(clock, workload) for _ in range(engines)]
        prompts = len(workload.prompt_tokens)
        self.requests = Requests(
            prompts, workload.group_size, engines, clock.max_running, workload.kept, workload.wanted
        )
        self.finished_s = np.full(prompts * workload.group_size, np.inf)
        self.last_s = np.zeros(engines)
        self.free_s = [0.0] * verifiers  # heap of when each verifier is free
        self.events: list[tuple[float, int, int, int]] = []  # (when, engine or _VERDICT, request, the engine's stamp)
        self.stamps = [0] * engines
        self.decoded_s = self.judged_s = 0.0

    def run(self) -> RolloutTime:
        self._deal(0.0)
        while self.events:
            moment_s, who, request, stamp = heapq.heappop(self.events)
            if who == _VERDICT:
                self.judged_s = moment_s
                if self.requests.judged(request):
                    break
                if self.workload.kept is not None:
                    self._deal(moment_s)
            elif stamp == self.stamps[who]:
                self._at_boundary(who)
        if self.workload.kept is not None:
            self.decoded_s = self.judged_s
        return RolloutTime(
            decoded_s=self.decoded_s,
            judged_s=self.judged_s,
            finished_s=self.finished_s,
            engine_s=self.last_s,
            busy_s=np.array([min(engine.busy_s, self.decoded_s) for engine in self.engines]),
            parts_s=dict(zip(PARTS, np.sum([engine.parts for engine in self.engines], axis=0).tolist(), strict=True)),
            iterations=sum(engine.iteration for engine in self.engines),
            preempted=sum(engine.preempted for engine in self.engines),
            prompts=self.requests.result_prompts,
        )

    def _at_boundary(self, who: int) -> None:
        engine = self.engines[who]
        engine.advance(engine.to_event())
        engine.give_up()
        ended = engine.take_ended()
        for request in ended:
            self.finished_s[request] = self.decoded_s = self.last_s[who] = engine.now_s
            begin_s = max(heapq.heappop(self.free_s), engine.now_s)
            heapq.heappush(self.free_s, begin_s + self.verdict_s)
            heapq.heappush(self.events, (begin_s + self.verdict_s, _VERDICT, request, 0))
            self.requests.decoded(who, request)
        if ended:
            self._deal(engine.now_s, but=who)
        engine.give_up()
        self._go_on(who)

    def _deal(self, moment_s: float, but: int | None = None) -> None:
        """Send what the manager sends now; engines with room take it up at their next iteration."""
        for who, requests, given_up in self.requests.deal():
            engine = self.engines[who]
            free = given_up or (not engine.waiting and len(engine.running) < engine.clock.max_running)
            moved = who != but and free and engine.advance_to(moment_s)
            if given_up:
                engine.unwanted.update(requests)
            else:
                engine.waiting.extend(requests)
            if moved:
                engine.give_up()
                self._go_on(who)

    def _go_on(self, who: int) -> None:
        engine = self.engines[who]
        self.stamps[who] += 1
        engine.admit()
        if engine.running:
            heapq.heappush(self.events, (engine.due_s(), who, 0, self.stamps[who]))
