"""Verifiers in Ray actors, and the pool that spreads samples over them. The only Ray user in this package.

``VerifierPool`` belongs to one asyncio loop, the RolloutManager's. Each actor has one feeder task that takes what is
queued, a few samples at a time, and gives it to its actor: an idle actor pulls, so the work goes to whoever is free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from or1_megatron.config import VerifyConfig
from or1_megatron.types import Completion, Problem, Verdict
from or1_megatron.verify.registry import build_verifiers

MAX_BATCH = 16
"""Samples in one call of an actor: a few milliseconds of work to amortise Ray's overhead of about one."""

_START_TIMEOUT_S = 120.0

Claim = tuple[Problem, str, bool]
"""(problem, response text, truncated): what a verifier needs of a completion, without its token arrays."""


@ray.remote(num_cpus=0)
class VerifierActor:
    """Holds one verifier per ability, in a process of its own."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._verifiers = build_verifiers(config, abilities)

    def ready(self) -> bool:
        """Returns when construction succeeded; raises what it raised otherwise."""
        return True

    def verify_batch(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Verdicts in the order of the claims."""
        return [self._verifiers[problem.ability].verify(problem, text, cut) for problem, text, cut in claims]


@dataclass(slots=True)
class _Job:
    claim: Claim
    verdict: asyncio.Future[Verdict]
    attempts: int = 0


class VerifierPool:
    """``config.workers`` verifier actors behind one awaitable call.

    ``ray_options`` go to every actor (run id, node affinity, ...). An actor that dies, or does not return within
    ``call_timeout_s``, is replaced; its samples are tried once more, each alone, so that one sample that kills its
    verifier takes no other with it, and then get status ``error``. ``retries`` counts the second tries.
    """

    def __init__(
        self,
        config: VerifyConfig,
        abilities: frozenset[str],
        ray_options: Mapping[str, Any] | None = None,
        call_timeout_s: float = 600.0,
    ) -> None:
        self.retries = 0
        self._config = config
        self._abilities = abilities
        self._ray_options = {"num_cpus": 0, **(ray_options or {})}
        self._call_timeout_s = call_timeout_s
        self._jobs: deque[_Job] = deque()
        self._wake = asyncio.Condition()
        self._actors: list[Any] = [self._new_actor() for _ in range(config.workers)]
        self._feeders: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until every actor is up. Raises RuntimeError with what a verifier's construction raised, or that
        an actor took too long."""
        calls = [_outcome(actor.ready.remote(), _START_TIMEOUT_S) for actor in self._actors]
        try:
            await asyncio.gather(*calls)
        except TimeoutError:
            raise RuntimeError(f"{len(calls)} verifier actors: not all up within {_START_TIMEOUT_S} s") from None
        except RayError as error:
            raise RuntimeError(f"a verifier actor did not start: {error}") from error
        self._start_feeders()

    async def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """The verdict on one completion. Never raises for what the response holds or does."""
        if problem.ability not in self._abilities:
            raise ValueError(
                f"{problem.origin}: ability '{problem.ability}', but the pool was built for {sorted(self._abilities)}"
            )
        self._start_feeders()
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        await self._put(_Job((problem, completion.text, completion.truncated), future))
        return await future

    @property
    def pending(self) -> int:
        """Samples that wait for an actor."""
        return len(self._jobs)

    async def close(self) -> None:
        """End the actors; verdicts still awaited are cancelled."""
        for feeder in self._feeders:
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)
        self._feeders = []
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        while self._jobs:
            self._jobs.popleft().verdict.cancel()

    def _new_actor(self) -> Any:
        return VerifierActor.options(**self._ray_options).remote(self._config, self._abilities)  # type: ignore[attr-defined]

    def _start_feeders(self) -> None:
        if not self._feeders:
            self._feeders = [asyncio.create_task(self._feed(slot)) for slot in range(len(self._actors))]

    async def _put(self, job: _Job) -> None:
        async with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    async def _take(self) -> list[_Job]:
        """A fair share of the queue, ``MAX_BATCH`` at most; a sample on its second try comes alone."""
        async with self._wake:
            await self._wake.wait_for(lambda: bool(self._jobs))
            share = min(MAX_BATCH, -(-len(self._jobs) // len(self._actors)))
            batch = [self._jobs.popleft()]
            while not batch[0].attempts and len(batch) < share and self._jobs and not self._jobs[0].attempts:
                batch.append(self._jobs.popleft())
            return batch

    async def _feed(self, slot: int) -> None:
        while True:
            batch = await self._take()
            try:
                call = self._actors[slot].verify_batch.remote([job.claim for job in batch])
                verdicts = await _outcome(call, self._call_timeout_s)
            except asyncio.CancelledError:
                for job in batch:
                    job.verdict.cancel()
                raise
            except (RayError, TimeoutError) as error:  # the actor died, hung or raised: its result, not ours
                ray.kill(self._actors[slot], no_restart=True)
                self._actors[slot] = self._new_actor()
                await self._again(batch, error)
            else:
                for job, verdict in zip(batch, verdicts, strict=True):
                    _settle(job, verdict)

    async def _again(self, batch: Sequence[_Job], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".strip()[:1000]
        for job in batch:
            job.attempts += 1
            if job.attempts > 1:
                _settle(job, Verdict(0.0, "error", "", f"the verifier failed twice: {reason}", 0.0))
            else:
                self.retries += 1
                await self._put(job)


def _settle(job: _Job, verdict: Verdict) -> None:
    if not job.verdict.done():  # its caller may have been cancelled
        job.verdict.set_result(verdict)


async def _outcome(call: Any, timeout_s: float) -> Any:
    """The result of an actor's call. Raises TimeoutError, or what the call raised."""
    return await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout_s)
