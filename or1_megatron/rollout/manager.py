"""The RolloutManager sends requests to the engines, completions to the verifiers, and groups back to the loop.

It is a process of its own, so that responses are collected, verified and grouped whatever the trainer does. It runs one
asyncio loop, with a task per engine that waits for completions and a task per completion that waits for its verdict.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.interfaces import EnginesLost
from or1_megatron.rollout.engine_thread import EngineFailed, Harvest
from or1_megatron.rollout.ray_errors import failure_of
from or1_megatron.rollout.request_plan import (
    RequestKey,
    SamplingBudget,
    assemble_group,
    dispatch,
    plan_requests,
    union_s,
)
from or1_megatron.types import Completion, Group, Prompt, RefillRule, Request, RolloutReport, Verdict
from or1_megatron.verify.pool.local import local_workers
from or1_megatron.verify.pool.queue import VerifierPool
from or1_megatron.verify.pool.ray import on_one_node, ray_workers

_HARVEST_WAIT_S = 5.0  # an idle engine answers this often: so its death is noticed
_NAMED_IN_ERRORS = 8


class RolloutError(EnginesLost):
    """The current roll-out cannot be completed; the message names the engine, the verifier or the requests."""


@dataclass
class _RollOut:
    """One roll-out under way."""

    prompts: Sequence[Prompt]
    group_size: int
    requests: Mapping[RequestKey, Request]
    keys: Mapping[int, RequestKey]  # by seed, which a completion carries
    waiting: deque[tuple[RequestKey, Request]]
    budget: SamplingBudget
    retries_before: int
    started_s: float = field(default_factory=time.time)
    engine_of: dict[int, int] = field(default_factory=dict)  # by seed, while the engine has it
    completions: dict[RequestKey, Completion] = field(default_factory=dict)
    verdicts: dict[RequestKey, Verdict] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)  # by prompt, once every verdict is there
    decoded: asyncio.Event = field(default_factory=asyncio.Event)
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    judged_s: float = 0.0
    """When the last verdict came, seconds since the epoch."""
    given: int = 0
    """Requests that were sent to an engine."""


class RolloutManager:
    """One roll-out at a time. Every method that waits ends with RolloutError as soon as a part has failed."""

    def __init__(
        self,
        engines: Sequence[Any],
        max_concurrent: int,
        verify: VerifyConfig,
        abilities: frozenset[str],
        ray_options: Mapping[str, Any],
        step_timeout_s: float,
    ) -> None:
        """
        Args:
            engines: EngineActor handles.
            max_concurrent: responses that one engine decodes at once.
            ray_options: for the verifier actors, where the cluster has several nodes; on one they are plain processes.
        """
        self._engines = list(engines)
        # Some requests more than an engine decodes at once fill its free places without a call.
        self._low = max(1, max_concurrent // 8)
        self._engine_limit = max_concurrent + self._low
        self._lost: set[int] = set()
        self._successors = False
        self._outstanding = [0] * len(self._engines)
        self._busy_s: list[list[tuple[float, float]]] = [[] for _ in self._engines]
        self._verify = verify
        self._abilities = abilities
        self._ray_options = ray_options
        self._step_timeout_s = step_timeout_s
        self._verifiers: VerifierPool | None = None
        self._current: _RollOut | None = None
        self._failure: RolloutError | None = None
        self._unwanted: dict[int, int] = {}  # engine by seed, of given-up requests that the engine still has
        self._idle = asyncio.Event()  # there are none
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the verifiers. Raises what a verifier's construction raises."""
        make = (
            local_workers(self._verify, self._abilities)
            if on_one_node()
            else ray_workers(self._verify, self._abilities, self._ray_options)
        )
        self._verifiers = VerifierPool(self._verify, self._abilities, make)
        await self._verifiers.start()
        for index in range(len(self._engines)):
            self._spawn(self._drain(index))

    async def roll_out(self, batch: bytes) -> None:
        """Start the pickled (prompts, group_size, sampling, seed, refill); return when the first requests are sent."""
        if self._failure is not None:
            raise self._failure
        if self._current is not None:
            raise RolloutError("roll_out: the previous roll-out has not been collected")
        assert self._verifiers is not None, "start() comes first"
        prompts: list[Prompt]
        refill: RefillRule | None
        prompts, group_size, sampling, seed, refill = pickle.loads(batch)
        requests = plan_requests(prompts, group_size, sampling, seed)
        keys = {request.seed: key for key, request in requests.items()}
        if len(keys) != len(requests):
            raise RolloutError(f"roll_out: seed {seed} gives two requests the same seed; choose another")
        self._busy_s = [[] for _ in self._engines]
        budget, waiting = SamplingBudget(len(prompts), refill), deque(requests.items())
        self._current = _RollOut(prompts, group_size, requests, keys, waiting, budget, self._verifiers.retries)
        self._feed(self._current)

    async def wait_decoded(self) -> None:
        current = self._under_way("wait_decoded")
        await self._wait_for(current.decoded, current, "sampled")

    async def collect(self) -> bytes:
        """Return pickled (groups, RolloutReport), groups in the order of the prompts."""
        current = self._under_way("collect")
        await self._wait_for(current.judged, current, "judged")
        await self._wait_for(self._idle, current, "given up")
        self._current = None
        groups = [current.groups[index] for index in range(current.budget.needed)]
        return pickle.dumps((groups, self._report(current, groups)), protocol=5)

    async def progress(self) -> tuple[int, int]:
        current = self._current
        if current is None:
            return (0, 0)
        asked = max(current.given, current.budget.allowed * current.group_size)
        return len(current.completions), min(asked, len(current.requests))

    async def abandon(self) -> None:
        """Give up the current roll-out, if there is one; return when no engine has a request of it."""
        current = self._current
        if current is None or self._failure is not None:
            return
        current.waiting.clear()
        self._give_up(current, 0)
        await asyncio.wait_for(self._idle.wait(), self._step_timeout_s)
        self._current = None

    async def expect_successors(self) -> None:
        """Let an engine's death fail nothing from now on: it will be replaced (``rejoin``)."""
        self._successors = True

    async def engines_lost(self) -> list[int]:
        return sorted(self._lost)

    async def rejoin(self, engines: Sequence[Any]) -> None:
        """Use these handles of all engines; new ones serve again."""
        for index, engine in enumerate(engines):
            if engine != self._engines[index]:
                self._lose(index, self._engines[index])  # if its death was not noticed
                self._engines[index] = engine
                self._lost.discard(index)
                self._spawn(self._drain(index))
        if self._current is not None:
            self._feed(self._current)

    async def close(self) -> None:
        """End the verifiers. The engines belong to their pool."""
        for task in self._tasks:
            task.cancel()
        if self._verifiers is not None:
            await self._verifiers.close()

    def _feed(self, current: _RollOut) -> None:
        """Send the engines as many requests as they have room for."""
        present = {n: count for n, count in enumerate(self._outstanding) if n not in self._lost}
        batches = dispatch(current.waiting, current.budget, present, self._engine_limit, self._low)
        for index, requests in batches.items():
            current.engine_of.update((request.seed, index) for request in requests)
            current.given += len(requests)
            self._outstanding[index] += len(requests)
            self._spawn(self._submit(index, requests))

    async def _submit(self, index: int, requests: list[Request]) -> None:
        engine = self._engines[index]
        try:
            await engine.submit.remote(pickle.dumps(requests, protocol=5))
        except RayError as error:
            self._engine_failed(index, engine, error)

    async def _drain(self, index: int) -> None:
        engine = self._engines[index]
        while self._failure is None and self._engines[index] == engine:
            try:
                harvest: Harvest = pickle.loads(await engine.harvest.remote(_HARVEST_WAIT_S))
            except RayError as error:
                self._engine_failed(index, engine, error)
                return
            if self._engines[index] != engine or index in self._lost:
                return  # its requests are being sampled elsewhere
            self._busy_s[index].extend(harvest.busy_s)
            for completion in harvest.completions:
                self._took(index, completion)
            if harvest.completions and self._current is not None:
                self._feed(self._current)

    def _engine_failed(self, index: int, engine: Any, error: RayError) -> None:
        gone = not isinstance(error, RayTaskError) or isinstance(error.cause, EngineFailed)
        if gone and self._successors:
            self._lose(index, engine)
        else:
            died = "" if isinstance(error, RayTaskError) else " died during the roll-out"
            self._fail(RolloutError(f"engine {index}{died}: {failure_of(error)}"))

    def _lose(self, index: int, engine: Any) -> None:
        """Give the engine's requests to the others, or to its successor, with the same seeds."""
        if self._engines[index] != engine or index in self._lost:
            return
        self._lost.add(index)
        for seed in [seed for seed, holder in self._unwanted.items() if holder == index]:
            self._forget(seed)
        self._outstanding[index] = 0
        current = self._current
        if current is None:
            return
        seeds = [seed for seed, holder in current.engine_of.items() if holder == index]
        for seed in seeds:
            del current.engine_of[seed]
        current.given -= len(seeds)
        keys = [current.keys[seed] for seed in seeds]
        current.waiting.extendleft((key, current.requests[key]) for key in reversed(keys))
        self._feed(current)

    def _took(self, index: int, completion: Completion) -> None:
        if self._unwanted.get(completion.seed) == index:  # it ended before it could be given up
            self._forget(completion.seed)
            return
        current = self._current
        key = None if current is None else current.keys.get(completion.seed)
        if current is None or key is None:
            self._fail(RolloutError(f"engine {index} finished a response that was not requested: {_name(completion)}"))
            return
        self._outstanding[index] -= 1
        del current.engine_of[completion.seed]
        current.completions[key] = completion
        self._spawn(self._judge(current, key, completion))
        if len(current.completions) == len(current.requests):
            current.decoded.set()

    def _give_up(self, current: _RollOut, first_prompt: int) -> None:
        """Abort the requests of the prompts from ``first_prompt`` on."""
        of_engine: dict[int, list[int]] = {}
        for seed, index in list(current.engine_of.items()):
            if current.keys[seed][0] >= first_prompt:
                of_engine.setdefault(index, []).append(seed)
                self._unwanted[seed] = index
                del current.engine_of[seed]
        if of_engine:
            self._idle.clear()
        for index, seeds in of_engine.items():
            self._spawn(self._abort(index, seeds))

    async def _abort(self, index: int, seeds: list[int]) -> None:
        engine = self._engines[index]
        try:
            for seed in await engine.call.remote("abort", seeds):
                self._forget(seed)
        except RayError as error:
            self._engine_failed(index, engine, error)

    def _forget(self, seed: int) -> None:
        if (index := self._unwanted.pop(seed, None)) is not None:
            self._outstanding[index] -= 1
        if not self._unwanted:
            self._idle.set()

    async def _judge(self, current: _RollOut, key: RequestKey, completion: Completion) -> None:
        assert self._verifiers is not None
        problem = current.requests[key].prompt.problem
        try:
            current.verdicts[key] = await self._verifiers.verify(problem, completion, key[0], current.group_size)
        except Exception as error:  # of the verifier pool itself: a bad sample gets a verdict
            self._fail(RolloutError(f"verifying {_name(completion)} failed: {type(error).__name__}: {error}"))
            return
        group = assemble_group(current.prompts, key[0], current.group_size, current.completions, current.verdicts)
        if current.budget.over or group is None:
            return
        current.groups[key[0]] = group
        current.budget.judged(key[0], group)
        if current.budget.over:
            current.judged_s = time.time()
            current.waiting.clear()
            self._give_up(current, current.budget.needed)
            current.decoded.set()
            current.judged.set()
        else:
            if current.budget.limit < len(current.prompts):
                self._give_up(current, current.budget.limit)
            self._feed(current)

    async def _wait_for(self, event: asyncio.Event, current: _RollOut, what: str) -> None:
        left_s = self._step_timeout_s - (time.time() - current.started_s)
        try:
            await asyncio.wait_for(event.wait(), max(left_s, 0.0))
        except TimeoutError:
            done = current.verdicts if what == "judged" else current.completions
            raise RolloutError(
                f"after rollout.step_timeout_s = {self._step_timeout_s:g} s, {len(current.requests) - len(done)} of "
                f"{len(current.requests)} responses were not {what}: {self._describe_missing(current, done)}"
            ) from None
        if self._failure is not None:
            raise self._failure

    def _describe_missing(self, current: _RollOut, done: Mapping[RequestKey, Any]) -> str:
        missing = []
        for key, request in current.requests.items():
            if key not in done:
                engine = current.engine_of.get(request.seed)
                where = "with a verifier" if key in current.completions else "waiting"
                where = where if engine is None else f"on engine {engine}"
                missing.append(f"problem {request.prompt.problem.id} sample {request.sample_index} ({where})")
        more = len(missing) - _NAMED_IN_ERRORS
        return "; ".join(missing[:_NAMED_IN_ERRORS]) + (f"; and {more} more" if more > 0 else "")

    def _fail(self, error: RolloutError) -> None:
        """End every wait with this failure; only the first one is reported."""
        if self._failure is None:
            self._failure = error
        if self._current is not None:
            self._current.decoded.set()
            self._current.judged.set()
        self._idle.set()

    def _under_way(self, what: str) -> _RollOut:
        if self._failure is not None:
            raise self._failure
        if self._current is None:
            raise RolloutError(f"{what}: no roll-out is under way")
        return self._current

    def _report(self, current: _RollOut, groups: Sequence[Group]) -> RolloutReport:
        assert self._verifiers is not None
        # An engine may still report its last period of an earlier roll-out that was given up.
        busy_s = [[part for part in parts if part[1] > current.started_s] for parts in self._busy_s]
        wanted = [completion for group in groups for completion in group.completions]
        return RolloutReport(
            decode_s=union_s([interval for intervals in busy_s for interval in intervals]),
            engine_busy_s=tuple(union_s(intervals) for intervals in busy_s),
            wall_s=current.judged_s - current.started_s,
            prompt_tokens=sum(len(group.prompt.token_ids) * len(group.completions) for group in groups),
            response_tokens=sum(len(completion.token_ids) for completion in wanted),
            verify_tail_s=max(0.0, current.judged_s - max(completion.finished_s for completion in wanted)),
            verifier_retries=self._verifiers.retries - current.retries_before,
            surplus_responses=current.given - len(wanted),
        )

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop keeps weak references only
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Report a task's unexpected error, or those who wait for the task would wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(RolloutError(f"the RolloutManager itself failed: {type(error).__name__}: {error}"))


ManagerActor = ray.remote(num_cpus=0)(RolloutManager)


def _name(completion: Completion) -> str:
    return f"sample {completion.sample_index} of problem {completion.problem_id}"
