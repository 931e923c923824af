"""Stages of training and the evaluation beside them: the sections ``stages`` and ``evaluate`` of a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from or1_megatron.config.base import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
)


class PlateauConfig(Section):
    """A stage may end before its ``steps`` once a metric has stopped rising.

    The metric's values within the stage (of a metric that is not in every row, such as an evaluation's, those that
    there are) are averaged over blocks of ``window`` values that follow each other. Whenever a block is full, its mean
    is compared with the best mean of the stage's earlier blocks: not above it by ``gain`` or more, it counts as flat.
    ``patience`` flat blocks in a row end the stage, though never before ``min_steps`` of its rollout steps.
    """

    metric: str = "accuracy/all"
    """A metric of docs/schemas.md of which more is better."""
    window: Positive = 20
    """Values per block."""
    gain: NonNegativeFloat = 0.005
    """What a block's mean must lie above the best before it, to count as progress."""
    patience: Positive = 1
    min_steps: NonNegative = 0


class StageEvaluationConfig(Section):
    """What one stage has otherwise than ``evaluate`` says. Not set: as there."""

    every_steps: NonNegative | None = None
    samples_during: Positive | None = None
    temperature: NonNegativeFloat | None = None
    top_p: Fraction | None = None
    max_response_tokens: Positive | None = None


class StageConfig(Section):
    """One stage: how much is sampled, how it is cut into SGD steps, for how long. RECIPE section 4."""

    name: str
    steps: Positive
    """Rollout steps in this stage; with ``plateau``, at most."""
    max_response_tokens: Positive
    """T: the context given to a response; what is cut off gets reward 0."""
    prompts_per_step: Positive
    """D_R: prompts sampled per rollout step."""
    prompts_per_update: Positive
    """D_T: prompts per SGD step; divides D_R."""
    group_size: Annotated[int, Field(ge=2)]
    """gs, M: responses per prompt. Of 2 or more: an advantage compares the responses of a group."""
    reuse: Positive = 1
    """N_reuse: passes over a step's data. SGD steps per rollout step: N_SGD = D_R / D_T * reuse."""
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    refill_prompts: NonNegative = 0
    """Prompts that a step may draw beyond D_R, until D_R groups are kept. 0: no refill, as in the recipe."""
    filter_solved: bool = True
    """Online filter: at this stage's start drop the prompts whose every sample was right in the previous stage."""
    min_pass_rate: Share = 0.0
    """Online filter: drop those too whose share of right samples in the previous stage lies below this."""
    max_pass_rate: Share = 1.0
    """Online filter: and those whose share lies above this."""
    mixture: Mapping[str, NonNegative] | None = None
    """How often each source of ``data.train`` (by its name) appears per epoch in this stage; 0: not at all. Not set:
    their ``repeat``."""
    plateau: PlateauConfig | None = None
    """Not set: the stage ends after ``steps``."""
    restart_optimizer: bool = False
    """Begin with fresh optimizer moments and learning-rate schedule, as the released code does. False: they go on."""
    restart_controller: bool = False
    """Begin with the entropy controller at c_0, as the released code does. False: it goes on."""
    evaluate: StageEvaluationConfig = StageEvaluationConfig()

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.prompts_per_step % self.prompts_per_update:
            raise ValueError(
                f"stage '{self.name}': prompts_per_step (D_R = {self.prompts_per_step}) is not a multiple of "
                f"prompts_per_update (D_T = {self.prompts_per_update}); choose a D_T that divides D_R"
            )
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"stage '{self.name}': min_pass_rate = {self.min_pass_rate:g} is above max_pass_rate = "
                f"{self.max_pass_rate:g}: no prompt that was sampled would be left"
            )
        if self.plateau is not None and self.plateau.min_steps > self.steps:
            raise ValueError(
                f"stage '{self.name}': plateau.min_steps = {self.plateau.min_steps} is above steps = {self.steps}; "
                "the plateau could never end the stage"
            )
        if self.mixture is not None and not any(self.mixture.values()):
            raise ValueError(f"stage '{self.name}': mixture leaves every source out; give at least one a repeat")
        return self

    @property
    def sgd_steps(self) -> int:
        """N_SGD = (D_R / D_T) * N_reuse, RECIPE section 1."""
        return self.prompts_per_step // self.prompts_per_update * self.reuse


class EvaluationSetConfig(Section):
    """One held-out set. What is not set here is as in ``evaluate``."""

    path: Path
    """As ``data.train``'s."""
    split: str | None = None
    name: str | None = None
    """In metrics: ``evaluation/<name>/accuracy``. Not set: the file's name without its ending, and the split if any."""
    samples: Positive | None = None
    samples_during: Positive | None = None
    temperature: NonNegativeFloat | None = None
    top_p: Fraction | None = None
    max_response_tokens: Positive | None = None

    @property
    def title(self) -> str:
        return self.name or (self.path.stem if self.split is None else f"{self.path.stem}_{self.split}")


class EvaluationConfig(Section):
    """Held-out evaluation on the same engines, in the final stage's context unless ``max_response_tokens`` is set."""

    data: tuple[EvaluationSetConfig, ...] = ()
    """The sets. With several, ``evaluation/accuracy`` is the mean of theirs."""
    every_steps: NonNegative = 0
    """0: only before and after training."""
    samples: Positive = 8
    """k of avg@k before and after training."""
    samples_during: Positive = 1
    """k of avg@k every ``every_steps``."""
    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    max_response_tokens: Positive | None = None
    seed: NonNegative = 20250522

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        refuse_twice((held_out.title for held_out in self.data), "evaluate.data")
        if odd := [held_out.title for held_out in self.data if "/" in held_out.title or not held_out.title]:
            raise ValueError(f"evaluate.data: a set cannot be named '{odd[0]}': it is part of a metric's name")
        return self

    def in_stage(self, stage: StageConfig) -> EvaluationConfig:
        """As it is in ``stage``: with what the stage has of its own."""
        return self.model_copy(update=stage.evaluate.model_dump(exclude_none=True))


def refuse_twice(names: Iterable[str], key: str) -> None:
    """Raise ValueError when a name comes twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{key}: two of its entries are named '{twice[0]}'; give each a 'name' of its own")
