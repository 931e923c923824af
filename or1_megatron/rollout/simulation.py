"""Rollouts on a simulated clock: the scheduler that runs real engines and verifiers, with clocks in their place.

Verifiers judge beside decoding, first come first served. The time of messages is left out, and engines are alike.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from or1_megatron.rollout.scheduler import Abort, Action, Judge, Scheduler, Submit
from or1_megatron.rollout.simulated_engine import Asked, EngineClock, SimulatedEngine
from or1_megatron.types import (
    Completion,
    Float32Array,
    Group,
    Int32Array,
    Prompt,
    RefillRule,
    Request,
    RolloutReport,
    Sampling,
    VersionSpan,
)
from or1_verify.types import Verdict, VerdictStatus


def not_truncated(completion: Completion) -> float:
    return float(not completion.truncated)


class SimulatedRollouts:
    """Implements ``interfaces.Rollouts`` on a clock of its own, which advances only in a wait or by ``spend``."""

    def __init__(
        self,
        engines: int,
        clock: EngineClock,
        length_of: Callable[[Request], int],
        reward_of: Callable[[Completion], float] = not_truncated,
        verifiers: int = 1,
        verdict_s: float = 0.0,
    ) -> None:
        """
        Args:
            length_of: tokens of the response to a request, 1 or more; it is truncated if that is T or more. With its
                prompt it must fit the KV cache.
            reward_of: the verifier.
            verdict_s: seconds that one of ``verifiers`` takes for a verdict.
        """
        self.engines = [SimulatedEngine(clock) for _ in range(engines)]
        self.scheduler = Scheduler(engines, clock.max_running)
        self.now_s = 0.0
        self._length_of, self._reward_of, self._verdict_s = length_of, reward_of, verdict_s
        self._free_s = [0.0] * verifiers  # heap of when each verifier is free
        self._engine_events: list[tuple[float, int, int]] = []  # heap of (when, engine, its stamp)
        self._verdicts: list[tuple[float, int, Judge]] = []  # heap of (when, number)
        self._stamps = [0] * engines
        self._judged = 0
        self._began_s: dict[int, float] = {}  # by ticket
        self._decoded_s: dict[int, float] = {}
        self._reported_s = 0.0

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        rule: RefillRule | None = None,
        urgent: bool = False,
    ) -> int:
        ticket, actions = self.scheduler.begin(prompts, group_size, sampling, seed, rule, urgent)
        self._began_s[ticket] = self._decoded_s[ticket] = self.now_s
        self._perform(actions)
        return ticket

    def wait_decoded(self, ticket: int | None = None) -> None:
        roll_out = self.scheduler.at(self._known(ticket))
        self._run(lambda: roll_out.decoded)

    def collect(self, ticket: int | None = None) -> tuple[list[Group], RolloutReport]:
        ticket = self._known(ticket)
        roll_out = self.scheduler.at(ticket)
        self._run(lambda: roll_out.judged)
        began_s = self._began_s.pop(ticket)
        since_s, self._reported_s = max(began_s, self._reported_s), self.now_s
        return self.scheduler.end(ticket).result(), roll_out.report(
            [self.busy(index, since_s, self.now_s) for index in range(len(self.engines))],
            wall_s=self.now_s - began_s,
            verify_tail_s=max(0.0, self.now_s - self._decoded_s.pop(ticket)),
            verifier_retries=0,
            period_s=self._reported_s - since_s,
        )

    def trained(self) -> None:
        pass  # nothing is saved here

    def finished_responses(self) -> bytes:
        return b""

    def reuse(self, responses: bytes, version: int | None = None) -> None:
        raise NotImplementedError("a simulated run is not resumed")

    def _known(self, ticket: int | None) -> int:
        return min(self.scheduler.tickets) if ticket is None else ticket

    def busy(self, index: int, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return the parts of a period, up to now, in which an engine worked."""
        parts = self.engines[index].busy_until(self.now_s)
        return [(max(start, start_s), min(end, end_s)) for start, end in parts if end > start_s and start < end_s]

    def spend(self, seconds: float) -> None:
        """Let time pass, in which the trainer trains, say; engines decode what they have."""
        self._run(lambda: False, self.now_s + seconds)

    def hand_off(self, version: int, seconds: float) -> None:
        """Give all engines new weights; none decodes meanwhile."""
        for index, engine in enumerate(self.engines):
            engine.pause(seconds, version, self.now_s)
            self._go_on(index)
        self.spend(seconds)

    def _run(self, holds: Callable[[], bool], end_s: float = math.inf) -> None:
        """Let time pass until ``holds``, or to ``end_s``. RuntimeError when neither would ever come."""
        while not holds():
            engine_s = self._engine_events[0][0] if self._engine_events else math.inf
            verdict_s = self._verdicts[0][0] if self._verdicts else math.inf
            when_s = min(engine_s, verdict_s)
            if when_s > end_s:
                self.now_s = end_s
                return
            if math.isinf(when_s):
                raise RuntimeError("the simulated engines have nothing to decode, and the rollout is not complete")
            if verdict_s <= engine_s:
                self.now_s, _, judge = heapq.heappop(self._verdicts)
                self._perform(self.scheduler.judged(judge.ticket, judge.key, self._verdict(judge.completion)))
                continue
            _, index, stamp = heapq.heappop(self._engine_events)
            if stamp == self._stamps[index]:
                self.now_s = when_s
                self._at_event(index)

    def _at_event(self, index: int) -> None:
        engine = self.engines[index]
        made = [_completion(asked, versions, self.now_s, index) for asked, versions in engine.to_event()]
        if made:
            self._perform(self.scheduler.finished(index, made), but=index)
            engine.settle()
        self._go_on(index)

    def _go_on(self, index: int) -> None:
        """Let an engine at a boundary admit what waits, and plan its next event."""
        engine = self.engines[index]
        self._stamps[index] += 1
        engine.admit()
        if engine.running:
            heapq.heappush(self._engine_events, (engine.due_s(), index, self._stamps[index]))

    def _perform(self, actions: Sequence[Action], but: int | None = None) -> None:
        """Do what the scheduler says. Engine ``but`` is at an event: it goes on afterwards."""
        left = deque(actions)
        while left:
            match left.popleft():
                case Submit(index, requests):
                    engine = self.engines[index]
                    moved = index != but and engine.has_room and engine.advance_to(self.now_s)
                    engine.submit(Asked(request, self._length(request)) for request in requests)
                    if moved:
                        self._go_on(index)
                case Abort(index, seeds):
                    engine = self.engines[index]
                    moved = index != but and engine.advance_to(self.now_s)
                    engine.abort(seeds)
                    if moved:
                        engine.settle()
                        self._go_on(index)
                    left.extend(self.scheduler.aborted(index, seeds))
                case Judge() as judge:
                    self._decoded_s[judge.ticket] = self.now_s
                    begin_s = max(heapq.heappop(self._free_s), self.now_s)
                    heapq.heappush(self._free_s, begin_s + self._verdict_s)
                    self._judged += 1
                    heapq.heappush(self._verdicts, (begin_s + self._verdict_s, self._judged, judge))

    def _length(self, request: Request) -> int:
        return min(self._length_of(request), request.sampling.max_response_tokens)

    def _verdict(self, completion: Completion) -> Verdict:
        reward = self._reward_of(completion)
        status: VerdictStatus = "right" if reward else "truncated" if completion.truncated else "wrong"
        return Verdict(reward, status, "", "", self._verdict_s)


def _completion(asked: Asked, versions: tuple[VersionSpan, ...], finished_s: float, engine: int) -> Completion:
    """Return a response of tokens 0 of log-prob 0, which take no memory."""
    request = asked.request
    token_ids: Int32Array = np.broadcast_to(np.int32(0), asked.length)
    log_probs: Float32Array = np.broadcast_to(np.float32(0), asked.length)
    assert asked.started_s is not None
    return Completion(
        problem_id=request.prompt.problem.id,
        sample_index=request.sample_index,
        token_ids=token_ids,
        log_probs=log_probs,
        text="",
        finish_reason="length" if asked.length == request.sampling.max_response_tokens else "stop",
        versions=versions,
        engine=engine,
        seed=request.seed,
        started_s=asked.started_s,
        finished_s=finished_s,
    )
