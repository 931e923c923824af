"""Prompts out, groups back: what a step asks of the stream and of the engines, and what the next one may ask early.

Refill. A step of a stage with ``refill_prompts`` is made of the shortest run of prompts, in the stream's order, of
which D_R groups are kept; of at most D_R + refill_prompts. Which prompts those are follows from the responses alone,
not from which engine was first, nor from how far ahead the engines were sent on. What was sampled beyond is thrown away
as if it had never been asked for, and its prompts come in the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.interfaces import EnginesLost, ProblemStream, Rollouts
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import Group, Prompt, RefillRule, RolloutReport, Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeepsGroup:
    """Whether a group would be kept. Picklable: the RolloutManager asks it."""

    config: AdvantageConfig

    def __call__(self, group: Group) -> bool:
        kept, _ = reject(assign_advantages([group], self.config), self.config)
        return bool(kept)


class Supply:
    """One roll-out at a time: of the present step, or, begun while that one trains, of the next ("ahead")."""

    def __init__(self, stream: ProblemStream, rollouts: Rollouts, advantage: AdvantageConfig, seed: int) -> None:
        self._stream, self._rollouts, self._keeps, self._seed = stream, rollouts, KeepsGroup(advantage), seed
        self._before: Mapping[str, Any] | None = None  # of the stream, before the prompts of a roll-out with refill
        self._before_ahead: Mapping[str, Any] | None = None
        self._ahead: tuple[list[Group], RolloutReport] | None = None
        self.rejected_share = 0.0
        """Of the last step's groups: it says how far ahead the engines are sent on; no result hangs on it."""

    @property
    def has_ahead(self) -> bool:
        """Whether the next step's groups are there already."""
        return self._ahead is not None

    @property
    def asked_ahead(self) -> bool:
        """Whether the engines are at work on the next step."""
        return self._before_ahead is not None and self._ahead is None

    def take(self, stage: StageConfig) -> list[Prompt]:
        """The prompts that a step may need: D_R, and those of its refill. DataError when there are fewer than D_R."""
        wanted, left = stage.prompts_per_step, self._stream.left
        extra = max(0, min(stage.refill_prompts, left - wanted))
        self._before = self._stream.state() if extra else None
        return self._stream.take(wanted + extra)

    def ask(self, prompts: Sequence[Prompt], stage: StageConfig, step: int) -> None:
        """Have the engines begin with step ``step`` (from 0)."""
        sampling = Sampling(stage.temperature, stage.top_p, stage.max_response_tokens)
        refill = None
        if len(prompts) > stage.prompts_per_step:
            refill = RefillRule(stage.prompts_per_step, self._keeps, self.rejected_share)
        seed = derive_seed(self._seed, "rollout", step)
        self._rollouts.roll_out(prompts, stage.group_size, sampling, seed, refill)

    def collect(self) -> tuple[list[Group], RolloutReport]:
        """The step's groups; prompts that it did not need go back to the stream."""
        if self._ahead is not None:
            found, self._ahead, self._before_ahead = self._ahead, None, None
            return found
        groups, report = self._rollouts.collect()
        if self._before is not None:
            self._stream.restore(self._before)
            self._stream.take(len(groups))
            self._before = None
        self.rejected_share = 1 - sum(map(self._keeps, groups)) / len(groups)
        return groups, report

    def ask_ahead(self, stage: StageConfig, step: int) -> None:
        """Begin with the next step; until ``finish_ahead`` nothing else can be asked."""
        self._before_ahead = self._stream.state()
        self.ask(self.take(stage), stage, step)

    def finish_ahead(self) -> RolloutReport:
        """Wait for what ``ask_ahead`` began. Raises what the roll-out raises, Stopped for one."""
        self._rollouts.wait_decoded()
        self._ahead = self.collect()
        return self._ahead[1]

    def abandon_ahead(self) -> None:
        """Give it up: its prompts were never drawn. Engines that are lost have given it up themselves."""
        try:
            self._rollouts.abandon()
        except EnginesLost as error:
            logger.warning("%s", error)
        assert self._before_ahead is not None
        self._stream.restore(self._before_ahead)
        self._before = self._before_ahead = None

    def stream_state(self) -> Mapping[str, Any]:
        """Of the stream as it is for the step that comes next, which a resumed run asks for anew."""
        return self._stream.state() if self._before_ahead is None else self._before_ahead
