"""What engines sample in a plan, and how they have worked. ``rollout.simulation`` runs it, with the run's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from or1_megatron.rollout.simulated_engine import PARTS, EngineClock
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import Completion, Int64Array, Prompt, Request, Sampling
from or1_verify.types import Problem

Floats = NDArray[np.float64]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the responses that they will have."""

    prompt_tokens: Int64Array  # [prompts]
    response_tokens: Int64Array  # [prompts * group_size], group by group
    group_size: int
    kept: Sequence[bool] = ()
    """Whether each prompt's group has rewards of both kinds; empty: all have."""

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of these lengths; a problem's name is its number."""
        sources = [Problem(str(number), "", "", (), "", {}, "") for number in range(len(self.prompt_tokens))]
        tokens = (np.broadcast_to(np.int32(0), length) for length in self.prompt_tokens)
        return [Prompt(*each) for each in zip(sources, tokens, strict=True)]

    @property
    def sequences(self) -> Int64Array:
        """Tokens of prompt and response, [prompts, group_size]."""
        return self.prompt_tokens[:, None] + self.response_tokens.reshape(-1, self.group_size)

    def length_of(self, request: Request) -> int:
        number = int(request.prompt.problem.id)
        return int(self.response_tokens[number * self.group_size + request.sample_index])

    def reward_of(self, completion: Completion) -> float:
        """The shortest response of a kept group is right, unless it is truncated, and no other."""
        number = int(completion.problem_id)
        kept = not self.kept or self.kept[number]
        first = number * self.group_size
        shortest = int(self.response_tokens[first : first + self.group_size].argmin())
        return float(kept and completion.sample_index == shortest and not completion.truncated)

    def on(self, clock: EngineClock, engines: int, verifiers: int, verdict_s: float) -> SimulatedRollouts:
        """Return engines whose responses are these. Each must fit the KV cache together with its prompt."""
        return SimulatedRollouts(engines, clock, self.length_of, self.reward_of, verifiers, verdict_s)


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """How engines worked, per step where several steps were simulated."""

    decoded_s: float
    """Seconds the loop waited for the last response."""
    judged_s: float
    """Seconds the loop waited for the last verdict."""
    period_s: float
    """The time that ``busy_s`` and ``spans`` are of."""
    busy_s: Floats  # [engines]
    spans: tuple[tuple[Span, ...], ...]
    """When each engine worked, in seconds since the (last) step's begin."""
    parts_s: dict[str, float]
    """Engine seconds by PARTS, of all engines."""
    iterations: int
    preempted: int

    @property
    def utilisation(self) -> float:
        """Share of ``period_s`` in which an engine works, mean over engines."""
        return float(self.busy_s.mean() / self.period_s) if self.period_s else 0.0


def simulate(workload: Workload, clock: EngineClock, engines: int, verifiers: int, verdict_s: float) -> RolloutTime:
    """Return the time of one rollout."""
    rollouts = workload.on(clock, engines, verifiers, verdict_s)
    longest = int(workload.response_tokens.max()) + 1
    rollouts.roll_out(workload.prompts, workload.group_size, Sampling(1.0, 1.0, longest), 0)
    rollouts.wait_decoded()
    decoded_s = rollouts.now_s
    _, report = rollouts.collect()
    return worked(rollouts, 1, decoded_s, rollouts.now_s, 0.0, decoded_s, np.array(report.engine_busy_s))


def worked(
    rollouts: SimulatedRollouts,
    steps: int,
    decoded_s: float,
    judged_s: float,
    step_begin_s: float,
    period_s: float,
    busy_s: Floats,
    before: Floats | float = 0.0,
) -> RolloutTime:
    """Return how engines worked in ``steps`` steps; all seconds are per step. ``before``: ``totals`` at their begin."""
    each = (totals(rollouts) - before) / steps
    spans = (rollouts.busy(index, step_begin_s, step_begin_s + period_s) for index in range(len(rollouts.engines)))
    return RolloutTime(
        decoded_s=decoded_s,
        judged_s=judged_s,
        period_s=period_s,
        busy_s=busy_s,
        spans=tuple(tuple((start - step_begin_s, end - step_begin_s) for start, end in parts) for parts in spans),
        parts_s=dict(zip(PARTS, each[2:].tolist(), strict=True)),
        iterations=round(each[0]),
        preempted=round(each[1]),
    )


def totals(rollouts: SimulatedRollouts) -> Floats:
    """Return iterations, preempted responses and seconds by PARTS, of all engines since their begin."""
    return np.sum([[engine.iteration, engine.preempted, *engine.parts] for engine in rollouts.engines], axis=0)
