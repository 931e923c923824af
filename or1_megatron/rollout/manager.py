"""The RolloutManager sends requests to the engines, completions to the verifiers, and groups back to the loop.

The manager is a process of its own, so that responses are collected, verified and grouped whatever the trainer does.
``scheduler`` decides which request goes to which engine, and the manager carries this out in one asyncio loop, with a
task per engine that waits for completions and a task per completion that waits for its verdict.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from or1_megatron.interfaces import EnginesLost
from or1_megatron.rollout.engine_thread import EngineFailed, Harvest
from or1_megatron.rollout.ray_errors import failure_of
from or1_megatron.rollout.request_plan import RequestKey
from or1_megatron.rollout.scheduler import Abort, Action, Judge, RollOut, Scheduler, Submit
from or1_megatron.rollout.verifier_actors import on_one_node, ray_workers
from or1_megatron.runtime.heartbeat import Heartbeat, beat_on_loop, beats_folder
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.runtime.timeline import add
from or1_megatron.types import Completion, Request, RolloutReport
from or1_verify.config import VerifyConfig
from or1_verify.pool.local import LocalWorker
from or1_verify.pool.queue import VerifierPool, Worker

_HARVEST_WAIT_S = 5.0  # an idle engine answers this often: so its death is noticed
ANSWER_S = 120.0
"""An engine answers within seconds. An answer that has not come for this long was lost on its way. A network that fails
for some seconds can lose an answer, and Ray notices minutes later, if at all."""
_NAMED_IN_ERRORS = 8


class RolloutError(EnginesLost):
    """The current rollout cannot be completed. The message names the engine, the verifier or the requests."""


@dataclass
class _UnderWay:
    """A rollout under way. Times are seconds since the epoch, but ``opened_s`` and ``deadline_s`` are monotonic."""

    ticket: int
    roll_out: RollOut
    retries_before: int
    started_s: float = field(default_factory=time.time)
    opened_s: float = field(default_factory=time.monotonic)
    deadline_s: float | None = None
    """None before the first wait. The time limit starts with the rollout. If other rollouts are under way at the first
    wait, it starts with that wait, because a rollout may be requested long before its turn."""
    judged_s: float = 0.0
    """When the last verdict came; 0: it has not come yet."""


class RolloutManager:
    """Samples, verifies and groups rollouts. Methods that wait raise RolloutError as soon as a part has failed."""

    def __init__(
        self,
        engines: Sequence[Any],
        max_concurrent: int,
        verify: VerifyConfig,
        abilities: frozenset[str],
        step_timeout_s: float,
        number: int = 0,
        answer_s: float = ANSWER_S,
    ) -> None:
        """
        Args:
            engines: EngineActor handles.
            max_concurrent: responses that one engine decodes at once.
            number: this manager's number. Engines ignore a manager once they know a manager with a larger number.
            answer_s: an engine that has answered once, and then does not answer for this long, is killed.
        """
        self._number = number
        self._answer_s = answer_s
        self._engines = list(engines)
        self._scheduler = Scheduler(len(engines), max_concurrent)
        self._lost_engines: dict[int, str] = {}  # reasons, by engine that is not yet restarted
        self._busy_s = [0.0] * len(self._engines)
        self._verify = verify
        self._abilities = abilities
        self._step_timeout_s = step_timeout_s
        self._verifiers: VerifierPool | None = None
        self._open: dict[int, _UnderWay] = {}  # by ticket
        self._sampled_before: dict[int, Completion] = {}  # by seed, until requested
        self._collected: list[int] = []  # seeds of responses that the client may not have yet
        self._reported_s = 0.0  # the engines' work up to then is in a report
        self._failure: RolloutError | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, run_id: str | None = None) -> None:
        """Start the verifiers, and with ``run_id`` the heartbeat. Raises what a verifier's construction raises."""
        settings = self._verify, self._abilities
        make: Callable[[], Worker] = partial(LocalWorker, *settings) if on_one_node() else ray_workers(*settings)
        if run_id is not None:
            self._spawn(beat_on_loop(Heartbeat(beats_folder(run_id), "the RolloutManager", "serving", long=False)))
        self._verifiers = VerifierPool(self._verify, self._abilities, make)
        await self._verifiers.start()
        for index in range(len(self._engines)):
            self._spawn(self._drain(index))

    async def roll_out(self, batch: bytes, sampled_before: Sequence[bytes] = ()) -> int:
        """Start a rollout and return its ticket once its requests are sent.

        Args:
            batch: the arguments of ``Scheduler.begin``, packed (``runtime.message``).
            sampled_before: packed lists of completions. A request of this or a later rollout takes the completion that
                has the request's seed, and is not sampled again. The caller guarantees that the two belong together.
        """
        if self._failure is not None:
            raise self._failure
        assert self._verifiers is not None, "start() comes first"
        retries = self._verifiers.retries
        self._sampled_before.update((made.seed, made) for part in sampled_before for made in unpack(part))
        try:
            ticket, actions = self._scheduler.begin(**unpack(batch))
        except ValueError as error:
            raise RolloutError(f"roll_out: {error}") from error
        self._open[ticket] = _UnderWay(ticket, self._scheduler.at(ticket), retries)
        self._perform(actions)
        return ticket

    async def wait_decoded(self, ticket: int | None) -> None:
        current = self._under_way("wait_decoded", ticket)
        await self._wait_until(lambda: current.roll_out.decoded, current, "sampled")

    async def collect(self, ticket: int | None) -> bytes:
        """Wait for all verdicts of a rollout, and return packed (groups in the order of the prompts, RolloutReport)."""
        current = self._under_way("collect", ticket)
        await self._wait_until(lambda: current.roll_out.judged, current, "judged")
        await self._wait_until(lambda: self._scheduler.off_engines(current.ticket), current, "given up")
        del self._open[current.ticket]
        if not self._open:  # what an earlier manager did not let the engines forget, and nobody requested again
            self._collected += self._sampled_before
            self._sampled_before.clear()
        groups = self._scheduler.end(current.ticket).result()
        self._collected += [request.seed for request in current.roll_out.requests.values()]
        return pack((groups, self._report(current)))

    async def forget_collected(self) -> None:
        """Let the engines drop the collected responses, because the client has received them."""
        seeds, self._collected = self._collected, []
        for engine in self._engines:
            engine.forget.remote(seeds)  # nobody waits for it

    async def finished_responses(self) -> bytes:
        """Return the packed completions made so far by all non-urgent rollouts under way."""
        roll_outs = map(self._scheduler.at, self._scheduler.tickets)
        return pack([made for roll_out in roll_outs if not roll_out.urgent for made in roll_out.completions.values()])

    async def progress(self) -> tuple[int, int]:
        first = self._scheduler.first
        return (0, 0) if first is None else self._scheduler.at(first).progress

    async def lost_engines(self) -> dict[int, str]:
        """Return why each lost engine is lost, by index. ``engines_restarted`` removes an engine from the result."""
        return self._lost_engines

    async def engines_restarted(self, engines: Sequence[Any]) -> None:
        """Take the handles of all engines, and use the restarted engines, whose handles are new."""
        new = [index for index, engine in enumerate(engines) if engine != self._engines[index]]
        self._engines = list(engines)
        for index in new:
            self._lost_engines.pop(index, None)
        self._perform(self._scheduler.engines_restarted(new))
        for index in new:
            self._spawn(self._drain(index))

    async def close(self) -> None:
        """End the verifiers. The engines belong to their pool."""
        for task in self._tasks:
            task.cancel()
        if self._verifiers is not None:
            await self._verifiers.close()

    def _perform(self, actions: Sequence[Action]) -> None:
        """Carry out the scheduler's actions, and wake the methods that wait."""
        left = deque(actions)
        while left:
            match action := left.popleft():
                case Submit(index, requests):
                    known = [request.seed for request in requests if request.seed in self._sampled_before]
                    if len(known) < len(requests):
                        new = [request for request in requests if request.seed not in self._sampled_before]
                        self._spawn(self._submit(index, self._engines[index], new))
                    left.extend(self._scheduler.finished(index, [self._sampled_before.pop(seed) for seed in known]))
                case Abort(index, seeds):
                    self._spawn(self._abort(index, seeds))
                case Judge(ticket):
                    self._spawn(self._judge(action, self._scheduler.at(ticket)))
        self._notice()

    def _notice(self) -> None:
        """Wake the methods that wait, because the condition of their wait may hold now."""
        for current in self._open.values():
            if current.roll_out.judged and not current.judged_s:
                current.judged_s = time.time()
        self._changed.set()

    async def _submit(self, index: int, engine: Any, requests: list[Request]) -> None:
        """Submit requests to ``engine``. It was engine ``index`` when chosen; a restart may have replaced it."""
        try:
            await engine.submit.remote(pack(requests), self._number)
        except RayError as error:
            self._call_failed(index, engine, error)

    async def _drain(self, index: int) -> None:
        engine = self._engines[index]
        timeout_s: float | None = None  # none yet: the engine may still be starting
        while self._failure is None and self._engines[index] == engine:
            try:
                call = engine.harvest.remote(_HARVEST_WAIT_S, keep=True, caller=self._number)
                harvest: Harvest = unpack(await asyncio.wait_for(call, timeout_s))
            except TimeoutError:
                silent = f"it gave no answer for {self._answer_s:g} s, and was killed"
                self._call_failed(index, engine, RayError(silent))
                return
            except RayError as error:
                self._call_failed(index, engine, error)
                return
            timeout_s = self._answer_s
            if self._engines[index] != engine or index in self._scheduler.lost_engines:
                return  # other engines sample its requests
            self._busy_s[index] += harvest.busy_s
            try:
                self._perform(self._scheduler.finished(index, harvest.completions))
            except ValueError as error:
                self._fail(RolloutError(str(error)))

    def _call_failed(self, index: int, engine: Any, error: RayError) -> None:
        """Count the engine as lost. If it has answered with an unexpected error, end all rollouts instead."""
        answered = isinstance(error, RayTaskError)
        if not answered:  # it may live and only be out of reach, and its requests are sampled elsewhere
            ray.kill(engine, no_restart=True)
        if answered and not isinstance(error.cause, EngineFailed):
            self._fail(RolloutError(f"engine {index}: {failure_of(error)}"))
        elif self._engines[index] == engine:
            self._lost_engines.setdefault(index, failure_of(error))
            self._perform(self._scheduler.engine_lost(index))

    async def _abort(self, index: int, seeds: list[int]) -> None:
        engine = self._engines[index]
        try:
            aborted = await engine.abort.remote(seeds, self._number)
        except RayError as error:
            self._call_failed(index, engine, error)
            return
        if self._engines[index] == engine:
            self._perform(self._scheduler.aborted(index, aborted))

    async def _judge(self, action: Judge, roll_out: RollOut) -> None:
        assert self._verifiers is not None
        completion, prompt = action.completion, roll_out.prompts[action.key[0]]
        problem = prompt.problem
        opened = "" if problem.ability in self._verify.custom else prompt.opened
        try:
            verdict = await self._verifiers.verify(problem, opened + completion.text, completion.truncated)
        except Exception as error:  # of the verifier pool itself: a bad sample gets a verdict
            name = f"sample {completion.sample_index} of problem {completion.problem_id}"
            self._fail(RolloutError(f"verifying {name} failed: {type(error).__name__}: {error}"))
            return
        now_ns = time.time_ns()
        add("verify", now_ns - int(verdict.wall_s * 1e9), now_ns, problem=problem.id, status=verdict.status)
        self._perform(self._scheduler.judged(action.ticket, action.key, verdict))

    async def _wait_until(self, holds: Callable[[], bool], current: _UnderWay, what: str) -> None:
        if current.deadline_s is None:
            began_s = time.monotonic() if len(self._open) > 1 else current.opened_s
            current.deadline_s = began_s + self._step_timeout_s
        try:
            async with asyncio.timeout(max(current.deadline_s - time.monotonic(), 0.0)):
                while self._failure is None and not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            roll_out = current.roll_out
            done = roll_out.verdicts if what == "judged" else roll_out.completions
            raise RolloutError(
                f"after rollout.step_timeout_s = {self._step_timeout_s:g} s, {len(roll_out.requests) - len(done)} of "
                f"{len(roll_out.requests)} responses were not {what}: {self._describe_missing(roll_out, done)}"
            ) from None
        if self._failure is not None:
            raise self._failure

    def _describe_missing(self, roll_out: RollOut, done: Mapping[RequestKey, Any]) -> str:
        missing = []
        for key, request in roll_out.requests.items():
            if key not in done:
                engine = self._scheduler.engine_of(request.seed)
                where = "with a verifier" if key in roll_out.completions else "waiting"
                where = where if engine is None else f"on engine {engine}"
                missing.append(f"problem {request.prompt.problem.id} sample {request.sample_index} ({where})")
        more = len(missing) - _NAMED_IN_ERRORS
        return "; ".join(missing[:_NAMED_IN_ERRORS]) + (f"; and {more} more" if more > 0 else "")

    def _fail(self, error: RolloutError) -> None:
        """End every wait with this error. Only the first error is reported."""
        if self._failure is None:
            self._failure = error
        self._notice()

    def _under_way(self, what: str, ticket: int | None) -> _UnderWay:
        if self._failure is not None:
            raise self._failure
        if ticket is None:
            ticket = min(self._open, default=-1)
        if ticket not in self._open:
            raise RolloutError(f"{what}: no rollout is under way")
        return self._open[ticket]

    def _report(self, current: _UnderWay) -> RolloutReport:
        assert self._verifiers is not None
        # Where several rollouts are under way, each report has the engines' work since the one before.
        since_s, self._reported_s = max(current.started_s, self._reported_s), time.time()
        busy_s = [min(one, self._reported_s - since_s) for one in self._busy_s]  # an earlier period's rest comes later
        self._busy_s = [one - reported for one, reported in zip(self._busy_s, busy_s, strict=True)]
        finished_s = (made.finished_s for group in current.roll_out.result() for made in group.completions)
        return current.roll_out.report(
            busy_s,
            wall_s=current.judged_s - current.started_s,
            # The responses may have been sampled before the start.
            verify_tail_s=max(0.0, current.judged_s - max(current.started_s, *finished_s)),
            verifier_retries=self._verifiers.retries - current.retries_before,
            period_s=self._reported_s - since_s,
        )

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop keeps weak references only
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Report a task's unexpected error; otherwise methods that wait for the task would wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(RolloutError(f"the RolloutManager itself failed: {type(error).__name__}: {error}"))


ManagerActor = ray.remote(num_cpus=0)(RolloutManager)
