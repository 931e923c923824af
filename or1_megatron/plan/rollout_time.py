"""What engines sample in a plan. ``rollout.simulation`` runs it, with the run's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from or1_megatron.rollout.simulated_engine import EngineClock
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import Completion, Int64Array, Prompt, Request, Sampling
from or1_verify.types import Problem


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
        return [Prompt(*both) for both in zip(sources, tokens, strict=True)]

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


def simulate(workload: Workload, rollouts: SimulatedRollouts) -> tuple[float, float]:
    """Sample ``workload``; return the seconds until its last response, and until its last verdict."""
    longest = int(workload.response_tokens.max()) + 1
    rollouts.roll_out(workload.prompts, workload.group_size, Sampling(1.0, 1.0, longest), 0)
    rollouts.wait_decoded()
    decoded_s = rollouts.now_s
    rollouts.collect()
    return decoded_s, rollouts.now_s
