"""The verifier pool: spreads responses over worker processes (``pool.local``, or others with the protocol ``Worker``).

``VerifierPool`` belongs to one asyncio loop. Each worker has one feeder task, which takes a response from the queue
when the worker is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from or1_verify.config import VerifyConfig
from or1_verify.errors import Or1Error
from or1_verify.types import Attempt, Problem, Verdict

_START_TIMEOUT_S = 120.0
_GRACE_S = 60.0
_CLOSE_S = 5.0


class WorkerLost(Or1Error):
    """A worker died or raised, as the message says. The response that the worker was judging has no verdict."""


class Worker(Protocol):
    """One process that judges, started at construction. Await ``ready`` first. Awaited calls may raise WorkerLost."""

    async def ready(self) -> None:
        """Wait until the worker's verifiers are built. Raises WorkerLost if they cannot be built."""
        ...

    async def verify(self, attempt: Attempt) -> Verdict: ...

    async def close(self) -> None:
        """Close the worker's verifiers cleanly. Afterwards only ``kill`` may be called."""
        ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class _Pending:
    attempt: Attempt
    verdict: asyncio.Future[Verdict]
    failed: bool = False


class VerifierPool:
    """Judges responses on ``config.workers`` workers, each made by ``make_worker``.

    A worker is replaced if it dies, or if it takes longer than ``call_timeout_s`` for a response (by default a minute
    more than ``config.budget_s``). The response then goes to the end of the queue for a second try. If the second try
    fails too, the response's verdict has the status ``error``. ``retries`` counts the second tries.
    """

    def __init__(
        self,
        config: VerifyConfig,
        abilities: frozenset[str],
        make_worker: Callable[[], Worker],
        call_timeout_s: float | None = None,
    ) -> None:
        self.retries = 0
        self._config = config
        self._abilities = abilities
        self._make_worker = make_worker
        self._call_timeout_s = call_timeout_s or config.budget_s + _GRACE_S
        self._samples: asyncio.Queue[_Pending] = asyncio.Queue()
        self._workers = [make_worker() for _ in range(config.workers)]
        self._unready = set(range(config.workers))  # slots whose worker has not been waited for
        self._feeders: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until every worker is ready. Raises RuntimeError if a worker fails or takes too long to start."""
        calls = [asyncio.wait_for(worker.ready(), _START_TIMEOUT_S) for worker in self._workers]
        try:
            await asyncio.gather(*calls)
        except TimeoutError:
            raise RuntimeError(f"{len(calls)} verifiers: not all up within {_START_TIMEOUT_S} s") from None
        except WorkerLost as error:
            raise RuntimeError(f"a verifier did not start: {error}") from error
        self._unready.clear()
        self._start_feeders()

    async def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Return the verdict on one response. Raises ValueError if the pool was not built for the problem's ability."""
        if problem.ability not in self._abilities:
            raise ValueError(
                f"{problem.origin}: ability '{problem.ability}', but the pool was built for {sorted(self._abilities)}"
            )
        self._start_feeders()
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._samples.put_nowait(_Pending((problem, response, truncated), future))
        return await future

    async def close(self) -> None:
        """End the workers, and cancel the verdicts that are still awaited."""
        for feeder in self._feeders:
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)
        self._feeders = []
        calls = [asyncio.wait_for(worker.close(), _CLOSE_S) for worker in self._workers]
        await asyncio.gather(*calls, return_exceptions=True)  # a busy or dead one is killed next
        for worker in self._workers:
            worker.kill()
        self._workers = []
        while not self._samples.empty():
            self._samples.get_nowait().verdict.cancel()

    def _start_feeders(self) -> None:
        if not self._feeders:
            self._feeders = [asyncio.create_task(self._feed(slot)) for slot in range(len(self._workers))]

    async def _feed(self, slot: int) -> None:
        while True:
            sample = await self._samples.get()
            try:
                if slot in self._unready:  # its start does not count as the call's time
                    async with asyncio.timeout(_START_TIMEOUT_S):
                        await self._workers[slot].ready()
                    self._unready.discard(slot)
                async with asyncio.timeout(self._call_timeout_s):
                    verdict = await self._workers[slot].verify(sample.attempt)
            except asyncio.CancelledError:
                sample.verdict.cancel()
                raise
            except (WorkerLost, TimeoutError) as error:  # it died, hung or raised
                self._replace(slot)
                self._again(sample, error)
            else:
                _settle(sample, verdict)

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = self._make_worker()
        self._unready.add(slot)

    def _again(self, sample: _Pending, error: Exception) -> None:
        if not sample.failed:
            sample.failed = True
            self.retries += 1
            self._samples.put_nowait(sample)
            return
        reason = f"{type(error).__name__}: {error}".strip()[:1000]
        _settle(sample, Verdict(0.0, "error", "", f"the verifier failed twice: {reason}", 0.0))


def _settle(sample: _Pending, verdict: Verdict) -> None:
    if not sample.verdict.done():  # its caller may have been cancelled
        sample.verdict.set_result(verdict)
