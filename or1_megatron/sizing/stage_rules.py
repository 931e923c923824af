"""Conflicts of a stage's plateau, refill, evaluation and batch size with the rest of the configuration and the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from or1_megatron.config.schema import Config, StageConfig
from or1_megatron.schemas.metrics import is_metric


def stage_conflicts(config: Config) -> Iterator[str]:
    """Yield a line for each reason why the stages cannot work with this evaluation and algorithm."""
    for stage in config.stages:
        if stage.refill_prompts and not config.algorithm.advantage.reject_uniform_groups:
            yield (
                f"stage '{stage.name}': refill_prompts = {stage.refill_prompts} makes up for rejected groups, and "
                "none is with algorithm.advantage.reject_uniform_groups=false; set that to true, or refill_prompts to 0"
            )
        every, where = config.evaluate.in_stage(stage).every_steps, "evaluate"
        if stage.evaluate.every_steps is not None:
            where = f"stage '{stage.name}': evaluate"
        if every and not config.evaluate.data:
            yield (
                f"{where}.every_steps = {every}, but evaluate.data is empty; name a problem file there, or set "
                "every_steps to 0"
            )
            return
        plateau = stage.plateau
        if plateau is None:
            continue
        titles = [held_out.title for held_out in config.evaluate.data]
        if not is_metric(plateau.metric, titles):
            yield (
                f"stage '{stage.name}': plateau.metric = '{plateau.metric}' is no metric of this run; docs/schemas.md "
                "lists them" + (f", and its held-out sets are {titles}" if titles else "")
            )
        elif plateau.metric.startswith("evaluation/") and not every:
            yield (
                f"stage '{stage.name}': plateau.metric = '{plateau.metric}' needs evaluations within the stage, and "
                "evaluate.every_steps is 0; set it, here or in the stage"
            )
        elif 2 * plateau.window * (every if plateau.metric.startswith("evaluation/") else 1) > stage.steps:
            yield (
                f"stage '{stage.name}': plateau.window = {plateau.window} values take more than half of the stage's "
                f"{stage.steps} steps: no second block would be full, and the plateau could never end it; lower window "
                "or raise steps"
            )


def problems_per_epoch(config: Config, stage: StageConfig, problems: Sequence[int]) -> int:
    """Return the number of prompts in an epoch of ``stage``: the sum over sources of problems * repeats.

    ``problems``: the number in each source.
    """
    return sum(count * repeat for count, repeat in zip(problems, config.repeats(stage), strict=True))


def problem_conflicts(config: Config, problems: Sequence[int]) -> Iterator[str]:
    """Yield a line for each stage that draws more prompts per step than there are problems."""
    for stage in config.stages:
        there = _within_reach(config, stage, problems)
        if stage.prompts_per_step > there:
            yield (
                f"stage '{stage.name}': prompts_per_step = {stage.prompts_per_step}, but data.train has {there} "
                + ("problems in the sources of the stage's mixture" if stage.mixture else "problems")
                + ", and those of a step all differ; lower prompts_per_step or add problems"
            )


def problem_warnings(config: Config, problems: Sequence[int]) -> Iterator[str]:
    for stage in config.stages:
        spare = _within_reach(config, stage, problems) - stage.prompts_per_step
        if stage.refill_prompts > spare:
            yield (
                f"stage '{stage.name}': refill_prompts = {stage.refill_prompts}, but there are {spare} problems beyond "
                f"prompts_per_step = {stage.prompts_per_step}; no more than those can be drawn"
            )


def _within_reach(config: Config, stage: StageConfig, problems: Sequence[int]) -> int:
    """Return the number of problems in the stage's sources, each counted once."""
    return sum(count for count, repeat in zip(problems, config.repeats(stage), strict=True) if repeat)
