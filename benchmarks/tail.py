"""Forecasts what the tail of a roll-out costs at 32B, on a clock: synchronous, deferred prompts, stale rollouts.

    python benchmarks/tail.py [--engines 8] [--steps 18]        (minutes)

The scheduler and the supply are those of a run; engines are simulated (rollout/simulation.py). Nothing is measured on a
GPU. What is assumed, for 256 H800 and 4,096 responses a step (D_R 256, gs 16, T 16K: stage 1 of Skywork-OR1-32B):

- lengths: log-normal with deviation 0.75, cut off at T, 60% of the variance of log-length the prompt's. The median is
  5,500 (7% are cut off) or 2,500 (0.6%). Nobody has published them.
- an engine of 4 GPUs takes a + b * n seconds for an iteration with n responses. a = 177 s / T: the part of rollout that
  more GPUs do not shorten in the paper's table 9 (32B, another workload). b makes a synchronous roll-out take the
  803 s of its table 7; or it is 0.25 ms, the time to read 10K tokens' keys and values from the memory of 4 GPUs.
- an update takes 97 s on all GPUs (table 7), a handoff 10 s; verdicts cost nothing. Prefill is left out.
- synchronous and deferring loops have all engines and take turns with the update. Stale ones have GPUs of their own:
  the best of several splits is taken, and the update takes as much longer as it has fewer GPUs.

Prints, for each, seconds per step, steps per hour over the synchronous loop's, engines' busy share (of the wall time,
in which an engine decodes), and the share of tokens that is thrown away. ``--engines`` scales D_R with it, 4 prompts
per engine; 64 is the cluster's number.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from result import figure, write_result
from rich.console import Console
from rich.table import Table
from tail_bias import prompt

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.data.stream import MixtureStream, PromptSource
from or1_megatron.rl.supply import Supply
from or1_megatron.rl.tail import Tail
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.types import Request

T, GROUP, PROMPTS_PER_ENGINE = 16384, 16, 4
SIGMA, SAME_GROUP = 0.75, 0.6
LONGEST_ALONE_S, ROLLOUT_S, UPDATE_S, HANDOFF_S = 177.0, 803.0, 97.0, 10.0
CONCURRENT_IN_TURNS, CONCURRENT_STALE = 256, 64  # what an engine decodes at once; with more, the oldest are slower
WARM_UP = 4  # steps that are not counted
SPLITS = (0.6, 0.7, 0.8, 0.85)
CASES = ((5500, None), (5500, 0.25e-3), (2500, 0.25e-3))
"""(median length, seconds per response in an iteration; None: calibrated)."""


@dataclass(frozen=True)
class World:
    """What all loops have in common."""

    engines: int
    steps: int
    median: int
    per_response_s: float = 0.0

    @property
    def prompts(self) -> int:
        return PROMPTS_PER_ENGINE * self.engines

    def iteration_s(self, responses: int) -> float:
        return LONGEST_ALONE_S / T + self.per_response_s * responses

    def length_of(self, request: Request) -> int:
        hard = random.Random(int(request.prompt.token_ids[0])).gauss() * SAME_GROUP**0.5
        own = random.Random(request.seed).gauss() * (1 - SAME_GROUP) ** 0.5
        return int(min(max(self.median * np.exp(SIGMA * (hard + own)), 1), T))


@dataclass(frozen=True)
class Outcome:
    """Of the steps after the first ``WARM_UP``, up to those that end the stage."""

    step_s: float
    busy: float
    wasted: float


def loop(world: World, share: float | None = None, staleness: int = 0, split: float = 1.0) -> Outcome:
    """Run a stage. ``split``: the share of all GPUs that is the engines' own; 1: they take turns with the trainer."""
    stage = StageConfig(
        name="32b",
        steps=world.steps,
        max_response_tokens=T,
        prompts_per_step=world.prompts,
        prompts_per_update=world.prompts,
        group_size=GROUP,
    )
    engines = round(world.engines * split)
    concurrent = CONCURRENT_STALE if staleness else CONCURRENT_IN_TURNS
    rollouts = SimulatedRollouts(engines, concurrent, world.iteration_s, world.length_of)
    stream = MixtureStream([PromptSource([prompt(index) for index in range(20 * world.prompts)])], 0)
    supply = Supply(stream, rollouts, AdvantageConfig(), 0, None if share is None else Tail(share, None))
    update_s = UPDATE_S if split == 1.0 else UPDATE_S / (1 - split)
    counted = range(WARM_UP, world.steps - WARM_UP)
    began_s = ended_s = busy_s = tokens = decoded = 0.0
    for step in range(world.steps):
        if step == counted.start:
            began_s, decoded = rollouts.now_s, sum(engine.tokens for engine in rollouts.engines)
        for ahead in range(supply.asked, min(staleness, world.steps - 1 - step) + 1):
            supply.ask(supply.take(stage, step + ahead, world.steps - step), stage, step + ahead)
        _, report = supply.collect()
        rollouts.spend(update_s)
        rollouts.hand_off(step + 1, HANDOFF_S)
        if step in counted:
            busy_s += float(np.mean(report.engine_busy_s))
            tokens += report.response_tokens
            ended_s = rollouts.now_s
            total = sum(engine.tokens for engine in rollouts.engines) - decoded
    wall_s = ended_s - began_s
    wasted = 0.0 if staleness else 1 - tokens / total
    return Outcome(wall_s / len(counted), busy_s / wall_s, max(wasted, 0.0))


def calibrated(world: World) -> World:
    """Return the world with b such that a synchronous roll-out takes ROLLOUT_S."""
    low, high = 0.0, 0.02
    while high - low > 1e-5:
        middle = (low + high) / 2
        trial = World(world.engines, WARM_UP * 2 + 2, world.median, middle)
        slower = loop(trial).step_s - UPDATE_S - HANDOFF_S > ROLLOUT_S
        low, high = (low, middle) if slower else (middle, high)
    return World(world.engines, world.steps, world.median, (low + high) / 2)


def best_split(world: World, staleness: int) -> tuple[Outcome, float]:
    found = [(loop(world, staleness=staleness, split=split), split) for split in SPLITS]
    return min(found, key=lambda each: each[0].step_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--steps", type=int, default=18)
    given = parser.parse_args()
    figures = {}
    for median, per_response_s in CASES:
        world = World(given.engines, given.steps, median, per_response_s or 0.0)
        world = calibrated(world) if per_response_s is None else world
        loops: dict[str, Callable[[], tuple[Outcome, float]]] = {"synchronous": lambda w=world: (loop(w), 1.0)}
        for share in (0.25, 0.5, 1.0):
            loops[f"defer, share {share:g}"] = lambda w=world, s=share: (loop(w, share=s), 1.0)
        for staleness in (1, 2):
            loops[f"staleness {staleness}"] = lambda w=world, n=staleness: best_split(w, n)
        case = f"median {median} tokens, b = {world.per_response_s * 1e3:.2f} ms"
        table = Table(title=case)
        for name in ("loop", "engines' GPUs", "step, s", "steps per hour, x", "busy", "thrown away"):
            table.add_column(name, justify="left" if name == "loop" else "right")
        outcomes = {name: make() for name, make in loops.items()}
        base = outcomes["synchronous"][0].step_s
        for name, (found, split) in outcomes.items():
            table.add_row(
                name,
                f"{split:.0%}" + ("" if split < 1 else ", in turns"),
                f"{found.step_s:.0f}",
                f"{base / found.step_s:.2f}",
                *(f"{value:.0%}" for value in (found.busy, found.wasted)),
            )
            key = f"{name}, {case}"
            wanted, busy = (1.8, 0.85) if "defer" in name else (2.2, 0.95) if name == "staleness 2" else (None, None)
            figures[f"steps per hour over synchronous: {key}"] = figure(base / found.step_s, "x", at_least=wanted)
            figures[f"engines busy: {key}"] = figure(found.busy, "share", at_least=busy)
        Console().print(table)
    settings = {"engines": given.engines, "steps": given.steps, "T": T, "sigma": SIGMA}
    write_result("tail", figures, settings)


if __name__ == "__main__":
    main()
