"""What deferring a step's slowest prompts changes in what is learnt, where the reward depends on nothing but length.

    python benchmarks/tail_bias.py        (half a minute)

A policy of one number, simulated engines, the scheduler and the supply of a run. Prints the level (log of a length)
after a stage of 64 steps of plain sampling and of ``rollout.tail: defer``, mean over 4 seeds: where every step's sum of
gradients is divided by the same number, by the step's own number of kept responses (``loss.divisor: own``), and by the
mean of that over the last steps (``running``). Then how much a step's mean length deviates from step to step, for a
policy that stays as it is, also with ``rollout.continued``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

import numpy as np

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.data.stream import MixtureStream, PromptSource
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.divisor import RunningDivisor
from or1_megatron.rl.supply import Supply
from or1_megatron.rl.tail import Tail
from or1_megatron.rollout.simulated_engine import EngineClock
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import Group, Message, Problem, Prompt, Request

STEPS, PROBLEMS, T = 64, 64, 400
SHORT = 100
Divisor = Literal["same", "own", "running"]
RATES: dict[Divisor, float] = {"same": 0.04, "own": 0.01, "running": 0.01}
"""Learning rates, such that about as much is learnt."""
STAGE = StageConfig(
    name="lengths", steps=STEPS, max_response_tokens=T, prompts_per_step=16, prompts_per_update=16, group_size=4
)


class Lengths:
    """A policy of one number: the log of a length is ``level``, a part that is the prompt's and one that is drawn, both
    of deviation 0.7; cut off at T. A response of at most ``SHORT`` tokens is right."""

    def __init__(self) -> None:
        self.level = 4.0
        self.divisor = RunningDivisor()

    def drawn(self, seed: int) -> float:
        """In deviations."""
        return random.Random(seed).gauss()

    def length_of(self, request: Request) -> int:
        hard = random.Random(int(request.prompt.token_ids[0])).gauss()
        return int(min(max(math.exp(self.level + 0.7 * hard + 0.7 * self.drawn(request.seed)), 1), T))

    def learn(self, groups: Sequence[Group], rate: float, divided_by: Divisor) -> None:
        """GRPO: the gradient of a length's log-probability with respect to ``level`` is its drawn part / 0.7.

        A step's sum is divided by all its responses ("same"), as many in every step, or by those that are kept.
        """
        kept, _ = reject(assign_advantages(groups, AdvantageConfig()), AdvantageConfig())
        terms = [
            float(advantage) * self.drawn(completion.seed) / 0.7
            for each in kept
            for advantage, completion in zip(each.advantages, each.group.completions, strict=True)
        ]
        count = max(sum(len(group.completions) for group in groups) if divided_by == "same" else len(terms), 1)
        (share,) = self.divisor.shares([count]) if divided_by == "running" else (1.0,)
        self.level += rate * share * math.fsum(terms) / count


def prompt(index: int) -> Prompt:
    problem = Problem(f"p{index}", "lengths", "math", (Message("user", ""),), "1", {}, f"lengths:{index}")
    return Prompt(problem, np.array([index], dtype=np.int32))


def run_stage(
    share: float | None,
    seed: int,
    rate: float = 0.0,
    divided_by: Divisor = "own",
    new_seeds: bool = False,
    continued: bool = False,
) -> tuple[list[list[Group]], float]:
    """Return the groups of each step of a stage, and the level after it.

    ``share``: of D_R, asked beyond it; None: plain sampling. ``new_seeds``: deferred prompts get new ones, as they
    should not. ``continued``: their responses are continued in the next step; only for a policy that stays as it is.
    """
    policy, tail = Lengths(), None if share is None else Tail(share, None, continued)
    rollouts = SimulatedRollouts(
        2,
        EngineClock(64, fixed_s=1.0, response_s=0.01),
        policy.length_of,
        lambda completion: float(completion.token_ids.size <= SHORT),
    )
    stream = MixtureStream([PromptSource([prompt(index) for index in range(PROBLEMS)])], seed)
    supply = Supply(stream, rollouts, AdvantageConfig(), seed, tail)
    found = []
    for step in range(STEPS):
        prompts = supply.take(STAGE, step, STEPS - step)
        if new_seeds:
            supply._places = None
        supply.ask(prompts, STAGE, step)
        groups, _ = supply.collect()
        policy.learn(groups, rate, divided_by)
        rollouts.hand_off(step + 1, 1.0)
        found.append(groups)
    return found, policy.level


def mean_level(share: float | None, rate: float, divided_by: Divisor, seeds: int) -> float:
    return float(np.mean([run_stage(share, seed, rate, divided_by)[1] for seed in range(seeds)]))


def step_lengths(share: float | None, continued: bool = False, seeds: int = 2) -> list[float]:
    """Return the mean length of each step's responses, of a policy that stays as it is."""
    stages = (run_stage(share, seed, continued=continued)[0] for seed in range(seeds))
    return [
        float(np.mean([c.token_ids.size for g in step for c in g.completions])) for steps in stages for step in steps
    ]


def main() -> None:
    print("| divided by | learnt by plain sampling, nats | share 0.25 | share 0.5 |\n|---|---|---|---|")
    for divided_by, rate in RATES.items():
        plain, *others = (4 - mean_level(share, rate, divided_by, 4) for share in (None, 0.25, 0.5))
        cells = " | ".join(f"{learnt:.3f} ({learnt / plain - 1:+.1%})" for learnt in others)
        print(f"| {divided_by} | {plain:.3f} | {cells} |", flush=True)
    print("\n| share | continued | a step's mean length, tokens | its deviation over steps |\n|---|---|---|---|")
    for share, continued in ((None, False), (0.25, False), (0.25, True), (0.5, False), (0.5, True), (1.0, True)):
        lengths = step_lengths(share, continued)
        cells = f"{'yes' if continued else 'no'} | {np.mean(lengths):.1f} | {np.std(lengths):.1f}"
        print(f"| {share or 'waits'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
