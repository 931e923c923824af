"""The configuration sections ``stages`` (batch sizes, response length, filters) and ``evaluate``; problem sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

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
    """A rule that ends a stage before its ``steps`` once a metric has stopped rising.

    The metric's values within the stage are averaged over blocks of ``window`` values (steps without the metric do not
    count). A full block is flat if its mean is at most the best mean of the stage's earlier blocks plus ``gain``.
    ``patience`` flat blocks in a row end the stage, but not within its first ``min_steps`` steps. In the paper a stage
    ends at a step count or when the metric converges (docs/recipe.md, section 3); the report gives no rule.
    """

    metric: str = "accuracy/all"
    """A metric of docs/schemas.md whose higher values are better."""
    window: Positive = 20
    """Number of the metric's values per block. Unit: values."""
    gain: NonNegativeFloat = 0.005
    """A block is flat if its mean is at most the best earlier mean plus this. Unit: the metric's."""
    patience: Positive = 1
    """Number of flat blocks in a row that end the stage. Unit: blocks."""
    min_steps: NonNegative = 0
    """The stage has at least this many steps."""


class _EvaluationChanges(Section):
    samples_during: Positive | None = None
    """Replaces ``evaluate.samples_during``. Unit: samples per problem."""
    temperature: NonNegativeFloat | None = None
    """Replaces ``evaluate.temperature``. Unit: none."""
    top_p: Fraction | None = None
    """Replaces ``evaluate.top_p``. Unit: share."""
    max_response_tokens: Positive | None = None
    """Replaces ``evaluate.max_response_tokens``."""


class StageEvaluationConfig(_EvaluationChanges):
    """Settings of ``evaluate`` that one stage replaces. Unset: the value of ``evaluate``."""

    every_steps: NonNegative | None = None
    """Replaces ``evaluate.every_steps``."""


class StageConfig(Section):
    """One stage of training: its rollout steps, batch sizes, response length, sampling and filters.

    docs/recipe.md, section 4, has the figures of each released model.
    """

    name: str
    """Name of the stage in output and messages."""
    steps: Positive
    """Rollout steps of this stage; with ``plateau``, at most this many. Recipe: docs/recipe.md, section 4."""
    max_response_tokens: Positive
    """T: the longest response; a response that is cut off at T gets reward 0. Recipe: 8K to 32K, growing from stage to
    stage (docs/recipe.md, sections 3 and 4)."""
    prompts_per_step: Positive
    """D_R: prompts sampled per rollout step. Unit: prompts. Recipe: docs/recipe.md, section 4."""
    prompts_per_update: Positive
    """D_T: prompts per SGD step; divides D_R. Unit: prompts. Recipe: docs/recipe.md, section 4."""
    group_size: Annotated[int, Field(ge=2)]
    """gs, M: responses per prompt, which form a group; an advantage compares the responses of one group. Unit:
    responses. Recipe: 16, 32 or 64 (docs/recipe.md, section 4)."""
    reuse: Positive = 1
    """N_reuse: passes over a step's data. A rollout step has N_SGD SGD steps: D_R / D_T times ``reuse``. Unit: passes.
    Recipe: 1 in every released model (docs/recipe.md, section 4)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the rollouts; log-probs and entropies use it too. Unit: none. Recipe: 1.0 in every
    released model (docs/recipe.md, section 4); ablation 4 compares 0.6."""
    top_p: Fraction = 1.0
    """Share of probability from which tokens are sampled (nucleus sampling); below 1 the gradient is biased. Unit:
    share. Recipe: 1 in every released model (docs/recipe.md, section 4)."""
    refill_prompts: NonNegative = 0
    """Prompts that a step may sample beyond D_R to replace rejected groups, until D_R groups are kept. 0: none. Unit:
    prompts. Recipe: neither the paper nor the released code refills (docs/recipe.md, section 3)."""
    filter_solved: bool = True
    """Online filter: at this stage's start, drop the prompts that were always solved in the previous stage. Recipe: on
    in the paper; the released code has no such filter (docs/recipe.md, section 3)."""
    min_pass_rate: Share = 0.0
    """Online filter: drop prompts whose pass rate in the previous stage lies below this. Unit: share."""
    max_pass_rate: Share = 1.0
    """Online filter: drop prompts whose pass rate in the previous stage lies above this. Unit: share."""
    mixture: Mapping[str, NonNegative] | None = None
    """How often each source of ``data.train`` (by its name) appears per epoch in this stage; 0: not at all. Unset: each
    source's ``repeat``. Unit: times."""
    plateau: PlateauConfig | None = None
    """A rule that may end the stage sooner. Unset: the stage ends after ``steps``."""
    restart_optimizer: bool = False
    """Begin with fresh optimizer moments and learning-rate schedule. False: the previous stage's moments and
    schedule go on. Recipe: the released code restarts them (docs/recipe.md, section 3)."""
    restart_controller: bool = False
    """Begin with the entropy controller at c_0. False: c goes on from the previous stage. Recipe: the released code
    restarts the controller (docs/recipe.md, sections 2 and 3)."""
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
        """N_SGD = (D_R / D_T) * N_reuse, the SGD steps of a rollout step (docs/recipe.md, section 1)."""
        return self.prompts_per_step // self.prompts_per_update * self.reuse


class ProblemSetConfig(Section):
    """A problem set: its path or hub id, split, columns and name."""

    path: Path
    """A file of problems (JSON, JSONL, Parquet), a folder of such files or of ``save_to_disk``, or a Hugging Face hub
    id. Columns: those of Skywork-OR1-RL-Data, {prompt, answer}, or of another published set (docs/data.md)."""
    split: str | None = None
    """Split of a folder or a hub id, e.g. math or code."""
    columns: dict[Literal["prompt", "answer", "ability", "source"], str] = Field(default_factory=dict)
    """Names of the columns that hold prompt and answer: {prompt: question, answer: label}. A name like
    extra_info.answer means a field inside a column; ability and source may be a fixed value, as in ability: code."""
    name: str | None = None
    """Name of the set in mixtures and metrics. Unset: the file's name without its ending, plus the split if any."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.columns and not {"prompt", "answer"} <= self.columns.keys():
            raise ValueError(f"columns names {', '.join(self.columns)}; expected prompt and answer among them")
        return self

    @property
    def title(self) -> str:
        return self.name or (self.path.stem if self.split is None else f"{self.path.stem}_{self.split}")


class EvaluationSetConfig(_EvaluationChanges, ProblemSetConfig):
    """One held-out problem set; its metric is ``evaluation/<name>/accuracy``. Unset keys are as in ``evaluate``."""

    samples: Positive | None = None
    """Replaces ``evaluate.samples``. Unit: samples per problem."""


class EvaluationConfig(Section):
    """Evaluation on held-out problem sets, by the engines that sample rollouts."""

    data: tuple[EvaluationSetConfig, ...] = ()
    """The held-out sets. ``evaluation/accuracy`` is the mean of their accuracies. Recipe: AIME24, AIME25 and
    LiveCodeBench 2024-08 to 2025-02 (docs/recipe.md, section 4)."""
    every_steps: NonNegative = 0
    """Evaluate after every n-th step, and before and after training. 0: only before and after."""
    samples: Positive = 8
    """k of avg@k before and after training. Unit: samples per problem. Recipe: 32 on AIME, 4 on LiveCodeBench
    (docs/recipe.md, section 4)."""
    samples_during: Positive = 1
    """k of avg@k in the evaluations after every n-th step. Unit: samples per problem."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0: greedy. Unit: none. Recipe: 1 (docs/recipe.md, section 4)."""
    top_p: Fraction = 1.0
    """Share of probability from which tokens are sampled. Unit: share. Recipe: 1 (docs/recipe.md, section 4)."""
    max_response_tokens: Positive | None = None
    """Longest response. Unset: T of the last stage. Recipe: 32768 (docs/recipe.md, section 4)."""
    seed: NonNegative = 20250522
    """Seed of the samples; the same in every evaluation. Unit: none."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        refuse_duplicates((held_out.title for held_out in self.data), "evaluate.data")
        if odd := [held_out.title for held_out in self.data if "/" in held_out.title or not held_out.title]:
            raise ValueError(f"evaluate.data: a set cannot be named '{odd[0]}': it is part of a metric's name")
        return self

    def samples_of(self, held_out: EvaluationSetConfig, whole: bool) -> int:
        """Return k of a set's avg@k: for evaluations before and after training if ``whole``, else within a stage."""
        if whole:
            return held_out.samples or self.samples
        return held_out.samples_during or self.samples_during

    def longest_of(self, held_out: EvaluationSetConfig, default: int) -> int:
        """Return a set's longest response in tokens; ``default`` if neither the set nor ``evaluate`` sets a limit."""
        return held_out.max_response_tokens or self.max_response_tokens or default

    def in_stage(self, stage: StageConfig) -> EvaluationConfig:
        """Return these settings with the replacements in ``stage.evaluate``."""
        return self.model_copy(update=stage.evaluate.model_dump(exclude_none=True))


def refuse_duplicates(names: Iterable[str], key: str) -> None:
    """Raise ValueError if a name occurs twice. The message names the configuration key ``key``."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{key}: two of its entries are named '{twice[0]}'; give each a 'name' of its own")
