"""What deferring a step's slowest prompts changes in what is learnt, where the reward depends on nothing but length.

    python benchmarks/tail_bias.py        (a minute)

A policy of one number, simulated engines, the scheduler and the supply of a run. Prints the level (log of a length)
after a stage of 64 steps of plain sampling and of ``rollout.tail: defer`` with each ``rollout.continued``, mean over 4
seeds: where every step's sum of gradients is divided by the same number, by the step's own number of kept responses
(``loss.divisor: own``), and by the mean of that over the last steps (``running``). Then how much a step's mean length
deviates from step to step, for a policy that stays as it is.

Left out: the importance ratio of old tokens with ``continued: train``. It is taken as 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.data.stream import MixtureStream, PromptSource
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.batch import sampled_since
from or1_megatron.rl.divisor import RunningDivisor
from or1_megatron.rl.supply import Supply
from or1_megatron.rl.tail import Tail
from or1_megatron.rollout.continued import generator_seed
from or1_megatron.rollout.simulated_engine import EngineClock
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import Completion, Group, Message, Problem, Prompt, Request

STEPS, PROBLEMS, T = 64, 64, 400
SHORT = 100
DEVIATION = 0.7
NORMAL = NormalDist()
Continued = Literal["none", "train", "mask"]
Divisor = Literal["same", "own", "running"]
RATES: dict[Divisor, float] = {"same": 0.04, "own": 0.01, "running": 0.01}
"""Learning rates, such that about as much is learnt."""
STAGE = StageConfig(
    name="lengths", steps=STEPS, max_response_tokens=T, prompts_per_step=16, prompts_per_update=16, group_size=4
)


class Lengths:
    """A policy of one number: the log of a length is ``level``, a part that is the prompt's and one that is drawn, both
    of deviation 0.7; cut off at T. A response of at most ``SHORT`` tokens is right. One that is continued is drawn anew
    from the lengths that it can still have."""

    def __init__(self) -> None:
        self.level = 4.0
        self.divisor = RunningDivisor()
        self._log_lengths: dict[int, float] = {}  # by seed, before the cut

    def length_of(self, request: Request) -> int:
        if request.before is None:
            drawn = random.Random(request.seed).gauss()
        else:
            longer = NORMAL.cdf(-self._deviations(request.prompt, math.log(request.before.token_ids.size + 1)))
            drawn = -NORMAL.inv_cdf(longer * random.Random(generator_seed(request)).random())
        log_length = self._mean(request.prompt) + DEVIATION * drawn
        self._log_lengths[request.seed] = log_length
        return int(min(max(math.exp(log_length), 1), T))

    def _mean(self, prompt: Prompt) -> float:
        """In the log of a length."""
        return self.level + DEVIATION * random.Random(int(prompt.token_ids[0])).gauss()

    def _deviations(self, prompt: Prompt, log_length: float) -> float:
        """Return how far it is from the mean."""
        return (log_length - self._mean(prompt)) / DEVIATION

    def _gradient(self, prompt: Prompt, completion: Completion, old: int) -> float:
        """Return the gradient of a length's log-probability with respect to ``level``, given that it exceeds ``old``.

        For a normal density it is z / deviation, less that of the log-probability to be longer, the density at ``old``
        over what is beyond.
        """
        gradient = self._deviations(prompt, self._log_lengths[completion.seed])
        if old:
            least = self._deviations(prompt, math.log(old + 1))
            gradient -= NORMAL.pdf(least) / NORMAL.cdf(-least)
        return gradient / DEVIATION

    def learn(self, groups: Sequence[Group], rate: float, divided_by: Divisor, since: int | None = None) -> None:
        """GRPO. ``since``: tokens of older versions are masked; None: none is.

        A step's sum is divided by all its responses ("same"), as many in every step, or by those that are trained.
        """
        kept, _ = reject(assign_advantages(groups, AdvantageConfig()), AdvantageConfig(), since)
        terms = []
        for each in kept:
            for advantage, completion in zip(each.advantages, each.group.completions, strict=True):
                old = 0 if since is None else int((~sampled_since(completion, since)).sum())
                if old < completion.token_ids.size:
                    terms.append(float(advantage) * self._gradient(each.group.prompt, completion, old))
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
    continued: Continued = "none",
) -> tuple[list[list[Group]], float]:
    """Return the groups of each step of a stage, and the level after it.

    ``share``: of D_R, asked beyond it; None: plain sampling. ``new_seeds``: deferred prompts get new ones, as they
    should not. ``continued``: as ``rollout.continued``.
    """
    policy, tail = Lengths(), None if share is None else Tail(share, None, continued != "none")
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
        policy.learn(groups, rate, divided_by, step if continued == "mask" else None)
        rollouts.hand_off(step + 1, 1.0)
        found.append(groups)
    return found, policy.level


def mean_level(
    share: float | None, rate: float, divided_by: Divisor, seeds: int, continued: Continued = "none"
) -> float:
    return float(np.mean([run_stage(share, seed, rate, divided_by, False, continued)[1] for seed in range(seeds)]))


def step_lengths(share: float | None, continued: Continued = "none", seeds: int = 2) -> list[float]:
    """Return the mean length of each step's responses, of a policy that stays as it is."""
    stages = (run_stage(share, seed, continued=continued)[0] for seed in range(seeds))
    return [
        float(np.mean([c.token_ids.size for g in step for c in g.completions])) for steps in stages for step in steps
    ]


def main() -> None:
    print("| divided by | continued | learnt by plain sampling, nats | share 0.25 | share 0.5 |\n|---|---|---|---|---|")
    for divided_by, rate in RATES.items():
        plain = 4 - mean_level(None, rate, divided_by, 4)
        for continued in get_args(Continued):
            others = (4 - mean_level(share, rate, divided_by, 4, continued) for share in (0.25, 0.5))
            cells = " | ".join(f"{learnt:.3f} ({learnt / plain - 1:+.1%})" for learnt in others)
            print(f"| {divided_by} | {continued} | {plain:.3f} | {cells} |", flush=True)
    print("\n| share | continued | a step's mean length, tokens | its deviation over steps |\n|---|---|---|---|")
    kinds: tuple[tuple[float | None, Continued], ...] = (
        (None, "none"),
        (0.25, "none"),
        (0.25, "train"),
        (0.5, "none"),
        (0.5, "train"),
        (1.0, "train"),
    )
    for share, continued in kinds:
        lengths = step_lengths(share, continued)
        cells = f"{'no' if continued == 'none' else 'yes'} | {np.mean(lengths):.1f} | {np.std(lengths):.1f}"
        print(f"| {share or 'waits'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
