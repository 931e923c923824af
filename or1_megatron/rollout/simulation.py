"""Engines and a verifier on a simulated clock, run by the scheduler that runs the real ones.

What it leaves out: prefill, the time of verdicts and of messages, and that engines differ. An engine decodes all its
responses together, one token each per iteration, and takes further ones as places become free.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from or1_megatron.rollout.request_plan import union_s
from or1_megatron.rollout.scheduler import Abort, Action, Judge, Scheduler, Submit
from or1_megatron.types import (
    Completion,
    DeferRule,
    Float32Array,
    Group,
    Int32Array,
    Place,
    Prompt,
    RefillRule,
    Request,
    RolloutReport,
    Sampling,
    Verdict,
    VerdictStatus,
    VersionSpan,
)

IterationSeconds = Callable[[int], float]
"""(responses that an engine decodes at once) -> seconds of one iteration, which gives each of them one token."""


@dataclass(order=True)
class _Decoding:
    """A response under way. ``last`` is the engine's count of iterations after which it has its last token."""

    last: float
    seed: int
    first: float = field(compare=False)
    started_s: float = field(compare=False)
    request: Request = field(compare=False)
    versions: list[VersionSpan] = field(compare=False)


class SimulatedEngine:
    """One engine. Between two events it does the same number of iterations per second."""

    def __init__(self, max_concurrent: int, iteration_s: IterationSeconds) -> None:
        self._places, self._iteration_s = max_concurrent, iteration_s
        self._waiting: deque[tuple[Request, int]] = deque()
        self._decoding: list[_Decoding] = []  # a heap
        self._iterations = 0.0
        self.now_s = 0.0
        self.version = 0
        self.busy_s: list[tuple[float, float]] = []
        """(start, end) of the periods in which it decoded."""
        self.tokens = 0.0
        """Decoded so far, those of aborted responses included."""

    @property
    def seeds(self) -> set[int]:
        """Those of the requests that it has."""
        return {each.seed for each in self._decoding} | {request.seed for request, _ in self._waiting}

    @property
    def next_s(self) -> float:
        """When its next response ends; infinite without one."""
        if not self._decoding:
            return math.inf
        left = max(self._decoding[0].last - self._iterations, 0.0)
        return self.now_s + left * self._iteration_s(len(self._decoding))

    def submit(self, requests: Iterable[tuple[Request, int]]) -> None:
        """Take requests, each with the length in tokens that its response will have."""
        self._waiting.extend(requests)
        self._fill()

    def advance(self, to_s: float) -> None:
        """Decode until a time that is not after ``next_s``."""
        if self._decoding and to_s > self.now_s:
            done = (to_s - self.now_s) / self._iteration_s(len(self._decoding))
            self._iterations += done
            self.tokens += done * len(self._decoding)
            start_s = self.now_s
            if self.busy_s and self.busy_s[-1][1] == start_s:
                start_s = self.busy_s.pop()[0]
            self.busy_s.append((start_s, to_s))
        self.now_s = max(to_s, self.now_s)

    def pause(self, seconds: float, version: int) -> None:
        """Take over weights: nothing is decoded meanwhile, and what is under way goes on with them."""
        self.now_s += seconds
        self.version = version
        for each in self._decoding:
            each.versions.append(VersionSpan(version, round(self._iterations - each.first)))

    def pop(self) -> tuple[Request, int, float, tuple[VersionSpan, ...]]:
        """Take off the response that ends now: (request, tokens, when it started, versions)."""
        ended = heapq.heappop(self._decoding)
        self._iterations = max(self._iterations, ended.last)
        self._fill()
        length = round(ended.last - ended.first)
        spans = [span for span in ended.versions if span.first_token < length]
        return ended.request, length, ended.started_s, tuple(spans)

    def abort(self, seeds: Iterable[int]) -> list[int]:
        """Take these off; return those that it had."""
        found = self.seeds & set(seeds)
        self._waiting = deque(item for item in self._waiting if item[0].seed not in found)
        self._decoding = [each for each in self._decoding if each.seed not in found]
        heapq.heapify(self._decoding)
        self._fill()
        return sorted(found)

    def _fill(self) -> None:
        while self._waiting and len(self._decoding) < self._places:
            request, length = self._waiting.popleft()
            begin = self._iterations
            spans = [VersionSpan(self.version, 0)]
            heapq.heappush(self._decoding, _Decoding(begin + length, request.seed, begin, self.now_s, request, spans))


class SimulatedRollouts:
    """Implements ``interfaces.Rollouts`` on a clock of its own, which advances only in a wait or by ``spend``."""

    def __init__(
        self,
        engines: int,
        max_concurrent: int,
        iteration_s: IterationSeconds,
        length_of: Callable[[Request], int],
        reward_of: Callable[[Completion], float] = lambda completion: float(not completion.truncated),
    ) -> None:
        """
        Args:
            length_of: tokens of the response to a request; it is truncated if that is T or more.
            reward_of: the verifier.
        """
        self.engines = [SimulatedEngine(max_concurrent, iteration_s) for _ in range(engines)]
        self.scheduler = Scheduler(engines, max_concurrent)
        self.now_s = 0.0
        self._length_of, self._reward_of = length_of, reward_of
        self._began_s: dict[int, float] = {}  # by ticket
        self._reported_s = 0.0

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        rule: RefillRule | DeferRule | None = None,
        places: Sequence[Place] | None = None,
        urgent: bool = False,
    ) -> int:
        ticket, actions = self.scheduler.begin(prompts, group_size, sampling, seed, rule, places, urgent)
        self._began_s[ticket] = self.now_s
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
        groups = self.scheduler.end(ticket).result()
        for engine in self.engines:
            engine.advance(self.now_s)
        busy_s = [[(max(start, since_s), end) for start, end in e.busy_s if end > since_s] for e in self.engines]
        for engine in self.engines:
            engine.busy_s = []
        wanted = [completion for group in groups for completion in group.completions]
        report = RolloutReport(
            decode_s=union_s([part for parts in busy_s for part in parts]),
            engine_busy_s=tuple(union_s(parts) for parts in busy_s),
            wall_s=self.now_s - began_s,
            prompt_tokens=sum(len(group.prompt.token_ids) * len(group.completions) for group in groups),
            response_tokens=sum(len(completion.token_ids) for completion in wanted),
            verify_tail_s=0.0,
            verifier_retries=0,
            surplus_responses=roll_out.given - len(wanted),
            prompts=tuple(roll_out.budget.result),
            period_s=self._reported_s - since_s,
        )
        return groups, report

    def progress(self) -> tuple[int, int]:
        first = self.scheduler.first
        return (0, 0) if first is None else self.scheduler.at(first).progress

    def _known(self, ticket: int | None) -> int:
        return min(self.scheduler.tickets) if ticket is None else ticket

    def spend(self, seconds: float) -> None:
        """Let time pass, in which the trainer trains, say; engines decode what they have."""
        end_s = self.now_s + seconds
        self._run(lambda: False, end_s)

    def hand_off(self, version: int, seconds: float) -> None:
        """Give all engines new weights; none decodes meanwhile."""
        for engine in self.engines:
            engine.advance(self.now_s)
            engine.pause(seconds, version)
        self.now_s += seconds

    def lose(self, index: int) -> None:
        """Let an engine die; what it has is sampled by others, from the start."""
        lost = self.engines[index]
        lost.abort(lost.seeds)
        self._perform(self.scheduler.lose(index))

    def rejoin(self, index: int) -> None:
        """Let the successor of a dead engine serve."""
        self._perform(self.scheduler.rejoin([index]))

    def _run(self, holds: Callable[[], bool], end_s: float = math.inf) -> None:
        """Let time pass until ``holds``, or to ``end_s``. RuntimeError when neither would ever come."""
        while not holds():
            engine = min(self.engines, key=lambda each: each.next_s)
            if engine.next_s > end_s:
                for each in self.engines:
                    each.advance(end_s)
                self.now_s = end_s
                return
            if math.isinf(engine.next_s):
                raise RuntimeError("the simulated engines have nothing to decode, and the roll-out is not complete")
            self.now_s = engine.next_s
            engine.advance(self.now_s)
            request, length, started_s, versions = engine.pop()
            index = self.engines.index(engine)
            made = _completion(request, length, started_s, self.now_s, versions, index)
            self._perform(self.scheduler.finished(index, [made]))

    def _perform(self, actions: Sequence[Action]) -> None:
        left = deque(actions)
        while left:
            match left.popleft():
                case Submit(index, requests):
                    self.engines[index].advance(self.now_s)
                    self.engines[index].submit((request, self._length_of(request)) for request in requests)
                case Abort(index, seeds):
                    self.engines[index].advance(self.now_s)
                    left.extend(self.scheduler.aborted(index, self.engines[index].abort(seeds)))
                case Judge(ticket, key, completion):
                    reward = self._reward_of(completion)
                    status: VerdictStatus = "right" if reward else "truncated" if completion.truncated else "wrong"
                    left.extend(self.scheduler.judged(ticket, key, Verdict(reward, status, "", "", 0.0)))


def _completion(
    request: Request, length: int, started_s: float, finished_s: float, versions: tuple[VersionSpan, ...], engine: int
) -> Completion:
    """Return a response of ``length`` tokens 0 of log-prob 0, which take no memory."""
    length = min(length, request.sampling.max_response_tokens)
    token_ids: Int32Array = np.broadcast_to(np.int32(0), length)
    log_probs: Float32Array = np.broadcast_to(np.float32(0), length)
    return Completion(
        problem_id=request.prompt.problem.id,
        sample_index=request.sample_index,
        token_ids=token_ids,
        log_probs=log_probs,
        text="",
        finish_reason="length" if length == request.sampling.max_response_tokens else "stop",
        versions=versions,
        engine=engine,
        seed=request.seed,
        started_s=started_s,
        finished_s=finished_s,
    )
