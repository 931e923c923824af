"""Lengths of prompts and responses that ``or1 plan`` assumes, from a past run or by the recipe's distribution.

The recipe's distribution is log-normal with sigma 1, cut at T. Half of the variance lies between prompts. A run begins
with 40% of responses above 8,192 tokens (docs/recipe.md, ablation 3), or above the first T if T is less. While more
than a tenth of responses are cut off, the median falls to 0.43 of its value in 540 steps, as lengths did in ablation 2
(12.5K to 5.4K tokens). The sigma, the tenth, prompts of 256 tokens and a share of 0.6 of kept groups are assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np
import pyarrow.compute as pc

from or1_megatron.config.schema import StageConfig
from or1_megatron.runtime.rollout_store import read_rollouts, rollout_files
from or1_megatron.types import Int64Array
from or1_verify.errors import UserError

SIGMA: Final = 1.0
START_TRUNCATED: Final = 0.4
START_TOKENS: Final = 8192
FALL: Final = 0.43 ** (1 / 540)
SETTLED_TRUNCATED: Final = 0.1
PROMPT_TOKENS: Final = 256
KEPT_SHARE: Final = 0.6


class LengthsError(UserError, ValueError):
    """The lengths of a past run cannot be read; the message names the run."""


Drawn = tuple[Int64Array, Int64Array]


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of training: after ``step`` steps of stage ``index`` (the first is 0)."""

    stages: Sequence[StageConfig]
    index: int
    step: float


@dataclass(frozen=True, slots=True)
class RecipeLengths:
    """The recipe's distribution of lengths over training (see the module's docstring)."""

    prompt_tokens: int = PROMPT_TOKENS
    kept_share: float = KEPT_SHARE
    """Share of the groups that are not rejected."""
    source: str = "the recipe's shape (an assumption: or1_megatron/plan/lengths.py)"

    def median(self, when: Moment) -> float:
        """Return the median response length at a point of training, in tokens."""
        stages, index, step = when.stages, when.index, when.step
        above = math.exp(SIGMA * NormalDist().inv_cdf(1 - START_TRUNCATED))
        median = min(START_TOKENS, stages[0].max_response_tokens) / above
        settled = math.exp(SIGMA * NormalDist().inv_cdf(1 - SETTLED_TRUNCATED))
        for number, stage in enumerate(stages[: index + 1]):
            steps = step if number == index else stage.steps
            median = min(median, max(median * FALL**steps, stage.max_response_tokens / settled))
        return median

    def draw(self, when: Moment, prompts: int, group_size: int, limit: int, random: np.random.Generator) -> Drawn:
        """Draw lengths: prompt tokens [prompts], and response tokens [prompts * group_size], at most ``limit``."""
        of_prompt = np.repeat(random.standard_normal(prompts), group_size)
        normal = math.sqrt(0.5) * (of_prompt + random.standard_normal(of_prompt.size))
        lengths = self.median(when) * np.exp(SIGMA * normal)
        return np.full(prompts, self.prompt_tokens), np.clip(lengths, 1, limit).astype(np.int64)


@dataclass(frozen=True, slots=True)
class MeasuredLengths:
    """The lengths of a past run, from which whole groups are drawn at random."""

    groups: tuple[Int64Array, ...]
    prompt_tokens: Int64Array  # [groups]
    kept_share: float
    source: str

    def draw(self, when: Moment, prompts: int, group_size: int, limit: int, random: np.random.Generator) -> Drawn:
        """Draw lengths as ``RecipeLengths.draw`` does, but without regard to ``when``."""
        chosen = random.integers(0, len(self.groups), prompts)
        drawn = [random.choice(self.groups[group], group_size) for group in chosen]
        return self.prompt_tokens[chosen], np.clip(np.concatenate(drawn), 1, limit)


Lengths = RecipeLengths | MeasuredLengths


def read_lengths(run: Path | None, longest_prompt: int) -> Lengths:
    """Return the lengths in the rollout files of a past run; the recipe's distribution if ``run`` is None.

    Prompts of more than ``longest_prompt`` tokens count as ``longest_prompt`` tokens.

    Raises:
        LengthsError: the folder is missing or has no rollouts.
    """
    if run is None:
        return RecipeLengths(min(PROMPT_TOKENS, longest_prompt))
    files = rollout_files(run / "rollouts")
    if not files:
        raise LengthsError(f"--lengths {run}: no rollouts: {run / 'rollouts'} holds no step_*.parquet")
    groups: list[Int64Array] = []
    prompts: list[int] = []
    kept = 0
    for file in files:
        table = read_rollouts(file, ["problem_id", "prompt_token_ids", "response_token_ids", "sample_index", "kept"])
        tokens = pc.list_value_length(table["response_token_ids"]).to_numpy().astype(np.int64)
        starts = np.flatnonzero(table["sample_index"].to_numpy() == 0)
        groups += np.split(tokens, starts[1:])
        prompts += pc.list_value_length(table["prompt_token_ids"]).to_numpy()[starts].tolist()
        kept += int(table["kept"].to_numpy(zero_copy_only=False)[starts].sum())
    source = f"{len(groups):,} groups of {run} ({len(files)} steps)"
    known = np.minimum(prompts, longest_prompt).astype(np.int64)
    return MeasuredLengths(tuple(groups), known, max(kept, 1) / len(groups), source)
