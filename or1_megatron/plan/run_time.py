"""Predicts the time of a whole run, from the middle step of each stage and from evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Lengths, Moment
from or1_megatron.plan.step_time import Machine, Steps, StepTime, Workload, sample

_PROBLEMS = 30
"""Number of problems assumed for an evaluation set of unknown size; AIME has 30."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Predicted time of one stage. Each step is assumed to last as long as the stage's middle step."""

    name: str
    count: int
    """Number of the stage's steps."""
    step: StepTime

    @property
    def hours(self) -> float:
        return self.count * self.step.seconds / 3600

    @property
    def tokens_per_s(self) -> float:
        return self.step.response_tokens / self.step.seconds

    @property
    def utilisation(self) -> float:
        """Share of a step's time in which an engine decodes (mean over engines)."""
        return self.step.engine_s / self.step.seconds


@dataclass(frozen=True, slots=True)
class RunTime:
    """Predicted time of a run. ``interval`` is ``hours`` * (1 -+ ``error``), with the hardware file's ``error``."""

    stages: tuple[StageTime, ...]
    evaluations_s: float
    """Seconds of the evaluations before and after training."""
    devices: int
    error: float

    @property
    def hours(self) -> float:
        return sum(stage.hours for stage in self.stages) + self.evaluations_s / 3600

    @property
    def interval(self) -> tuple[float, float]:
        return self.hours * max(0.0, 1 - self.error), self.hours * (1 + self.error)

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.devices

    @property
    def step_s(self) -> dict[str, float]:
        """Seconds per verb of a step (mean over all steps of the run)."""
        total = sum(stage.count for stage in self.stages)
        names = dict.fromkeys(name for stage in self.stages for name in stage.step.verbs)
        return {name: sum(s.count * s.step.verbs.get(name, 0.0) for s in self.stages) / total for name in names}

    @property
    def binds(self) -> str:
        """The part that takes the most time in the longest stage, in words."""
        return max(self.stages, key=lambda stage: stage.hours).step.binds


def run_time(config: Config, machine: Machine, lengths: Lengths, problems: Sequence[int] | None = None) -> RunTime:
    """Predict the time of a run of ``config``: of the stage ``run.stage`` if this key is set, else of all stages.

    Args:
        problems: number of problems of each evaluation set; None: 30 each.
    """

    def evaluation_s(when: Moment, random: np.random.Generator, whole: bool) -> float:
        """Return the seconds of one evaluation on all sets; ``whole``: the evaluation is before or after training."""
        settings = config.evaluate.in_stage(config.stages[when.index])
        asked, answers = [], []
        for number, held_out in enumerate(settings.data):
            limit = settings.longest_of(held_out, config.stages[-1].max_response_tokens)
            count = _PROBLEMS if problems is None else problems[number]
            prompts, responses = lengths.draw(when, count, settings.samples_of(held_out, whole), limit, random)
            asked.append(np.repeat(prompts, len(responses) // len(prompts)))
            answers.append(responses)
        if not asked:
            return 0.0
        return sample(config, machine, Workload(np.concatenate(asked), np.concatenate(answers), 1))[1]

    chosen = range(len(config.stages)) if config.run.stage is None else [config.run.stage - 1]
    stages = []
    for index in chosen:
        stage = config.stages[index]
        random = np.random.default_rng([1, index])
        middle = Moment(config.stages, index, stage.steps / 2)
        step = Steps(config, machine, lengths, middle, evaluation_s(middle, random, whole=False), random).mean()
        stages.append(StageTime(stage.name, stage.steps, step))
    first, last = chosen[0], chosen[-1]
    ends = (Moment(config.stages, first, 0), Moment(config.stages, last, config.stages[last].steps))
    random = np.random.default_rng(1)
    return RunTime(
        stages=tuple(stages),
        evaluations_s=sum(evaluation_s(at, random, whole=True) for at in ends),
        devices=config.devices,
        error=machine.rates.error,
    )
