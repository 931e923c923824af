"""Spreads samples over verifier processes: ``pool.local``'s here, or others behind the same protocol (``Worker``).

``VerifierPool`` belongs to one asyncio loop. Each worker has one feeder task, which takes samples from the queue when
the worker is idle: as many at once as should be done within ``CALL_S``, so that quick ones share a call and slow ones
delay nobody.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from or1_verify.config import VerifyConfig
from or1_verify.errors import Or1Error
from or1_verify.types import Attempt, Problem, Verdict

MAX_BATCH = 16
"""Largest number of samples in a call: some milliseconds of work, against a call's overhead of about one."""

CALL_S = 0.2
"""How long one call of a worker should take."""
_START_TIMEOUT_S = 120.0
_GRACE_S = 60.0
_CLOSE_S = 5.0
_RECENT = 0.2  # weight of the newest sample in the mean time of an ability's verdicts


class WorkerLost(Or1Error):
    """A worker died or raised; the message says how. The samples of its call have no verdict."""


class Worker(Protocol):
    """One process that judges. It starts when it is made; ``ready`` comes first. All its calls raise WorkerLost."""

    async def ready(self) -> None:
        """Return when the verifiers are built. WorkerLost says why they could not be."""
        ...

    async def verify_batch(self, attempts: Sequence[Attempt]) -> list[Verdict]: ...

    async def close(self) -> None:
        """End cleanly what the verifiers have started. Only ``kill`` may follow."""
        ...

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        ...


@dataclass(slots=True)
class _Pending:
    attempt: Attempt
    verdict: asyncio.Future[Verdict]
    group: Hashable = None
    tries: int = 0
    failed_at: int | None = None
    """The slot of the worker that failed on it."""


class VerifierPool:
    """``config.workers`` workers, each made by ``make_worker``, behind one awaitable call.

    A worker that dies is replaced, and so is one that takes longer than ``call_timeout_s`` (None: ``config.budget_s``
    and a minute for each sample of the call). Its samples are tried once more, each alone and by another worker where
    there is one, so that a sample that kills its verifier takes no other with it. A sample that fails twice gets status
    ``error``. ``retries`` counts the second tries.
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
        self._call_timeout_s = call_timeout_s
        self._samples: list[_Pending] = []
        self._missing: Counter[Hashable] = Counter()  # by group: samples without a verdict, also those not decoded yet
        self._mean_s: dict[str, float] = {}  # by ability: the mean time of one verdict
        self._wake = asyncio.Condition()
        self._workers = [make_worker() for _ in range(config.workers)]
        self._unready = set(range(config.workers))  # slots whose worker has not been waited for
        self._feeders: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until every worker is ready. Raises RuntimeError when a verifier could not be built or took too long."""
        calls = [asyncio.wait_for(worker.ready(), _START_TIMEOUT_S) for worker in self._workers]
        try:
            await asyncio.gather(*calls)
        except TimeoutError:
            raise RuntimeError(f"{len(calls)} verifiers: not all up within {_START_TIMEOUT_S} s") from None
        except WorkerLost as error:
            raise RuntimeError(f"a verifier did not start: {error}") from error
        self._unready.clear()
        self._start_feeders()

    async def verify(
        self, problem: Problem, response: str, truncated: bool, group: Hashable = None, group_size: int = 0
    ) -> Verdict:
        """Return the verdict on one response. Never raises because of what the response holds or does.

        Samples whose ``group`` lacks the fewest verdicts of its ``group_size`` go first.
        """
        if problem.ability not in self._abilities:
            raise ValueError(
                f"{problem.origin}: ability '{problem.ability}', but the pool was built for {sorted(self._abilities)}"
            )
        self._start_feeders()
        if group is not None and group not in self._missing:
            self._missing[group] = group_size
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        await self._put(_Pending((problem, response, truncated), future, group))
        try:
            return await future
        finally:
            self._missing[group] -= 1
            if self._missing[group] <= 0:
                del self._missing[group]

    @property
    def pending(self) -> int:
        """The number of samples that wait for a worker."""
        return len(self._samples)

    async def close(self) -> None:
        """End the workers; verdicts still awaited are cancelled."""
        for feeder in self._feeders:
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)
        self._feeders = []
        calls = [asyncio.wait_for(worker.close(), _CLOSE_S) for worker in self._workers]
        await asyncio.gather(*calls, return_exceptions=True)  # a busy or dead one is killed next
        for worker in self._workers:
            worker.kill()
        self._workers = []
        for sample in self._samples:
            sample.verdict.cancel()
        self._samples = []

    def _start_feeders(self) -> None:
        if not self._feeders:
            self._feeders = [asyncio.create_task(self._feed(slot)) for slot in range(len(self._workers))]

    async def _put(self, sample: _Pending) -> None:
        async with self._wake:
            self._samples.append(sample)
            self._wake.notify_all()

    async def _take(self, slot: int) -> list[_Pending]:
        """Wait for samples and return those that this slot's worker should do next; see ``_choose``."""
        async with self._wake:
            await self._wake.wait_for(lambda: any(self._may_take(slot, sample) for sample in self._samples))
            batch = self._choose(slot)
            chosen = {id(sample) for sample in batch}
            self._samples = [sample for sample in self._samples if id(sample) not in chosen]
            return batch

    def _choose(self, slot: int) -> list[_Pending]:
        """Return a fair share of the queue that should be done within ``CALL_S``, groups that lack least first.

        A sample on its second try comes alone.
        """
        waiting = sorted(
            (sample for sample in self._samples if self._may_take(slot, sample)),
            key=lambda sample: self._missing[sample.group],
        )
        if waiting[0].tries:
            return waiting[:1]
        share = min(MAX_BATCH, -(-len(self._samples) // len(self._workers)))
        batch, left_s = waiting[:1], CALL_S
        for sample in waiting[1:share]:
            left_s -= self._mean_s.get(sample.attempt[0].ability, CALL_S)
            if sample.tries or left_s <= 0:
                break
            batch.append(sample)
        return batch

    def _may_take(self, slot: int, sample: _Pending) -> bool:
        return sample.failed_at != slot or len(self._workers) == 1

    async def _feed(self, slot: int) -> None:
        while True:
            batch = await self._take(slot)
            limit_s = self._call_timeout_s or len(batch) * (self._config.budget_s + _GRACE_S)
            try:
                if slot in self._unready:  # its start does not count as the call's time
                    async with asyncio.timeout(_START_TIMEOUT_S):
                        await self._workers[slot].ready()
                    self._unready.discard(slot)
                attempts = [sample.attempt for sample in batch]
                async with asyncio.timeout(limit_s):
                    verdicts = await self._workers[slot].verify_batch(attempts)
            except asyncio.CancelledError:
                for sample in batch:
                    sample.verdict.cancel()
                raise
            except (WorkerLost, TimeoutError) as error:  # it died, hung or raised
                self._replace(slot)
                await self._again(slot, batch, error)
            else:
                for sample, verdict in zip(batch, verdicts, strict=True):
                    self._time(sample.attempt[0].ability, verdict.wall_s)
                    _settle(sample, verdict)

    def _time(self, ability: str, wall_s: float) -> None:
        mean_s = self._mean_s.get(ability, wall_s)
        self._mean_s[ability] = mean_s + _RECENT * (wall_s - mean_s)

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = self._make_worker()
        self._unready.add(slot)

    async def _again(self, slot: int, batch: Sequence[_Pending], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".strip()[:1000]
        for sample in batch:
            sample.tries += 1
            sample.failed_at = slot
            if sample.tries > 1:
                _settle(sample, Verdict(0.0, "error", "", f"the verifier failed twice: {reason}", 0.0))
            else:
                self.retries += 1
                await self._put(sample)


def _settle(sample: _Pending, verdict: Verdict) -> None:
    if not sample.verdict.done():  # its caller may have been cancelled
        sample.verdict.set_result(verdict)
