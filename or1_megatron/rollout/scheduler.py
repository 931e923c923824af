"""Schedules rollouts: decides which requests are sent to engines and which are aborted; ends finished rollouts.

The scheduler takes events and returns actions, which ``manager`` carries out with engines and verifiers. It has no
clock, no engine and no Ray. ``request_plan.dispatch`` chooses the engine.

Every request is with at most one engine and is answered once. An engine's answer to a request that it does not have is
an error; answers of a lost engine are dropped. Several rollouts may be under way. Requests of urgent rollouts are sent
first, and then requests of older rollouts before requests of newer ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from or1_megatron.rollout.refill import SamplingBudget
from or1_megatron.rollout.request_plan import RequestKey, assemble_group, dispatch, plan_requests
from or1_megatron.types import Completion, Group, Prompt, RefillRule, Request, RolloutReport, Sampling
from or1_verify.types import Verdict


@dataclass(frozen=True, slots=True)
class Submit:
    """An action: send the requests to the engine."""

    engine: int
    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    """An action: abort the requests of these seeds on the engine; report the aborted seeds to ``Scheduler.aborted``."""

    engine: int
    seeds: list[int]


@dataclass(frozen=True, slots=True)
class Judge:
    """An action: verify the completion, and report the verdict to ``Scheduler.judged``."""

    ticket: int
    key: RequestKey
    completion: Completion


Action = Submit | Abort | Judge


@dataclass
class RollOut:
    """One rollout under way: its prompts and requests, and the completions, verdicts and groups so far."""

    prompts: Sequence[Prompt]
    group_size: int
    requests: Mapping[RequestKey, Request]
    waiting: deque[tuple[RequestKey, Request]]
    budget: SamplingBudget
    urgent: bool = False
    completions: dict[RequestKey, Completion] = field(default_factory=dict)
    verdicts: dict[RequestKey, Verdict] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    """The groups whose verdicts are all there, by the index of the prompt."""
    sent: int = 0
    """Number of requests that were sent to an engine."""

    @property
    def decoded(self) -> bool:
        """Return whether every response that is needed has been sampled."""
        return self.budget.over or len(self.completions) == len(self.requests)

    @property
    def judged(self) -> bool:
        """Return whether every group of the result is there."""
        return self.budget.over

    @property
    def progress(self) -> tuple[int, int]:
        """Return (responses finished, responses that are expected to be needed)."""
        needed = max(self.sent, self.budget.allowed * self.group_size)
        return len(self.completions), min(needed, len(self.requests))

    def result(self) -> list[Group]:
        """Return the groups of the result, in the order of the prompts."""
        return [self.groups[index] for index in range(self.budget.limit)]

    def report(self, busy_s: Sequence[float], **measured: Any) -> RolloutReport:
        """Return the rollout's report.

        Args:
            busy_s: for each engine, the seconds for which it decoded.
            measured: the fields of the report that the scheduler does not know.
        """
        groups = self.result()
        wanted = [completion for group in groups for completion in group.completions]
        return RolloutReport(
            decode_s=max(busy_s),
            engine_busy_s=tuple(busy_s),
            prompt_tokens=sum(len(group.prompt.token_ids) * len(group.completions) for group in groups),
            response_tokens=sum(len(completion.token_ids) for completion in wanted),
            surplus_responses=self.sent - len(wanted),
            **measured,
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that an engine has."""

    engine: int
    ticket: int
    key: RequestKey | None
    """None: the request was given up, and the engine has not yet confirmed the abort."""


class Scheduler:
    """Schedules rollouts over engines. Tickets name the rollouts, and indices the engines. Not thread-safe."""

    def __init__(self, engines: int, max_concurrent: int) -> None:
        """``max_concurrent``: responses that one engine decodes at once."""
        # Some requests more than an engine decodes at once fill its free places without a call.
        self._low = max(1, max_concurrent // 8)
        self._room = max_concurrent + self._low
        self._load = dict.fromkeys(range(engines), 0)  # by engine that is not lost
        self.lost_engines: set[int] = set()
        self._held: dict[int, _Held] = {}  # by seed
        self._unwanted = Counter[int]()  # by ticket: requests that were given up and are still with an engine
        self._roll_outs: dict[int, RollOut] = {}  # by ticket: urgent ones, then the oldest first
        self._tickets = 0

    def begin(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        rule: RefillRule | None = None,
        urgent: bool = False,
    ) -> tuple[int, list[Action]]:
        """Start a rollout and return (its ticket, actions). The arguments are those of ``interfaces.Rollouts``.

        Raises:
            ValueError: two requests, of this rollout or of rollouts under way, would have the same seed.
        """
        requests = plan_requests(prompts, group_size, sampling, seed)
        seeds = {request.seed for request in requests.values()}
        others = {request.seed for other in self._roll_outs.values() for request in other.requests.values()}
        if len(seeds) < len(requests) or seeds & (others | self._held.keys()):
            raise ValueError(f"seed {seed} gives two requests the same seed; choose another")
        self._tickets += 1
        budget = SamplingBudget(len(prompts), rule)
        made = RollOut(prompts, group_size, requests, deque(requests.items()), budget, urgent)
        self._roll_outs[self._tickets] = made
        self._roll_outs = dict(sorted(self._roll_outs.items(), key=lambda item: (not item[1].urgent, item[0])))
        return self._tickets, self._feed()

    @property
    def first(self) -> int | None:
        """Return the ticket of the oldest urgent rollout, else of the oldest rollout; None: no rollout is under way."""
        return next(iter(self._roll_outs), None)

    @property
    def tickets(self) -> list[int]:
        """Return the tickets of the rollouts under way, the oldest first."""
        return sorted(self._roll_outs)

    def at(self, ticket: int) -> RollOut:
        """Return the rollout of the ticket, which must be under way."""
        return self._roll_outs[ticket]

    def off_engines(self, ticket: int) -> bool:
        """Return whether the engines have aborted or finished all requests of the rollout that were given up."""
        return not self._unwanted[ticket]

    def engine_of(self, seed: int) -> int | None:
        """Return the engine that has the request of this seed; None: the request waits or is finished."""
        held = self._held.get(seed)
        return None if held is None else held.engine

    def end(self, ticket: int) -> RollOut:
        """Remove a rollout whose result is there, and return it."""
        return self._roll_outs.pop(ticket)

    def finished(self, engine: int, completions: Iterable[Completion]) -> list[Action]:
        """Take responses that an engine has sampled, and return the actions that follow.

        Raises:
            ValueError: the engine does not have the request of one of these responses.
        """
        if engine in self.lost_engines:
            return []
        actions: list[Action] = []
        for completion in completions:
            if self.engine_of(completion.seed) != engine:
                name = f"sample {completion.sample_index} of problem {completion.problem_id}"
                raise ValueError(f"engine {engine} finished a response that was not requested: {name}")
            held = self._take_off(completion.seed)
            if held.key is not None:  # None: the request ended before it could be aborted
                self._roll_outs[held.ticket].completions[held.key] = completion
                actions.append(Judge(held.ticket, held.key, completion))
        return [*actions, *self._feed()]

    def judged(self, ticket: int, key: RequestKey, verdict: Verdict) -> list[Action]:
        """Take the verdict on a completion, and return the actions that follow. An ended rollout's verdict is dropped.

        Raises:
            ValueError: there is no such completion, or it already has a verdict.
        """
        roll_out = self._roll_outs.get(ticket)
        if roll_out is None:
            return []
        if key not in roll_out.completions or key in roll_out.verdicts:
            raise ValueError(f"a verdict on {key} of rollout {ticket}, which has no completion or a verdict already")
        roll_out.verdicts[key] = verdict
        budget, prompt_index = roll_out.budget, key[0]
        group = assemble_group(
            roll_out.prompts, prompt_index, roll_out.group_size, roll_out.completions, roll_out.verdicts
        )
        if budget.over or group is None:
            return []
        roll_out.groups[prompt_index] = group
        fewer = budget.judged(prompt_index, group)
        return [*(self._give_up(ticket) if fewer else []), *self._feed()]

    def aborted(self, engine: int, seeds: Iterable[int]) -> list[Action]:
        """Record that the engine has aborted the requests of these seeds, and return the actions that follow."""
        for seed in seeds:
            held = self._held.get(seed)
            if held is not None and held.engine == engine and held.key is None:
                self._take_off(seed)
        return self._feed()

    def engine_lost(self, engine: int) -> list[Action]:
        """Return actions that request a lost engine's responses again, with the same seeds, from any other engine."""
        self._take_requests_from(engine)
        return self._feed()

    def engines_restarted(self, engines: Iterable[int]) -> list[Action]:
        """Use these restarted engines, whether or not ``engine_lost`` was called for them; return the actions."""
        for engine in engines:
            self._take_requests_from(engine)
            self.lost_engines.discard(engine)
            self._load = dict(sorted([*self._load.items(), (engine, 0)]))
        return self._feed()

    def _take_requests_from(self, engine: int) -> None:
        if engine in self.lost_engines:
            return
        self.lost_engines.add(engine)
        for seed in [seed for seed, held in self._held.items() if held.engine == engine]:
            held = self._take_off(seed)
            if held.key is not None:
                roll_out = self._roll_outs[held.ticket]
                roll_out.sent -= 1
                roll_out.waiting.append((held.key, roll_out.requests[held.key]))
        del self._load[engine]
        for roll_out in self._roll_outs.values():  # sorted, so that no needed request is behind one that is not needed
            roll_out.waiting = deque(sorted(roll_out.waiting, key=itemgetter(0)))

    def _take_off(self, seed: int) -> _Held:
        held = self._held.pop(seed)
        self._load[held.engine] -= 1
        if held.key is None:
            self._unwanted -= Counter([held.ticket])  # drops what has come to 0
        return held

    def _give_up(self, ticket: int) -> list[Action]:
        """Return actions that abort the requests of prompts that are no longer wanted."""
        roll_out = self._roll_outs[ticket]
        if roll_out.budget.over:
            roll_out.waiting.clear()
        of_engine: dict[int, list[int]] = {}
        for seed, held in self._held.items():
            if held.ticket == ticket and held.key is not None and not roll_out.budget.wants(held.key[0]):
                of_engine.setdefault(held.engine, []).append(seed)
        for engine, seeds in of_engine.items():
            self._unwanted[ticket] += len(seeds)
            self._held.update((seed, _Held(engine, ticket, None)) for seed in seeds)
        return [Abort(engine, seeds) for engine, seeds in of_engine.items()]

    def _feed(self) -> list[Action]:
        """Return actions that send the engines as many requests as they have room for."""
        actions: list[Action] = []
        for ticket, roll_out in self._roll_outs.items():
            batches = dispatch(roll_out.waiting, roll_out.budget, self._load, self._room, self._low)
            for engine, sent in batches.items():
                self._held.update((request.seed, _Held(engine, ticket, key)) for key, request in sent)
                self._load[engine] += len(sent)
                roll_out.sent += len(sent)
                actions.append(Submit(engine, [request for _, request in sent]))
        return actions
