"""Takes a step's prompts from the stream, has them sampled, and returns the groups; the next step's too, if early.

Refill: a step of a stage with ``refill_prompts`` consists of the shortest prefix of the stream's prompts of which D_R
groups are kept, at most D_R + refill_prompts. Which prompts these are depends on the responses alone, not on which
engine was first or how many prompts were started early. Responses beyond are thrown away, and their prompts come in the
next step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.interfaces import EnginesLost, ProblemStream, Rollouts
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.checks import check_prompts
from or1_megatron.rl.metrics import Filtered
from or1_megatron.rl.stages import PassRateLedger
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import Group, Prompt, RefillRule, RolloutReport, Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeepsGroup:
    """Whether a group would be kept. Picklable: the RolloutManager calls it."""

    config: AdvantageConfig

    def __call__(self, group: Group) -> bool:
        kept, _ = reject(assign_advantages([group], self.config), self.config)
        return bool(kept)


class Supply:
    """One roll-out at a time: the current step's, or the next one's while the current step trains ("ahead")."""

    def __init__(self, stream: ProblemStream, rollouts: Rollouts, advantage: AdvantageConfig, seed: int) -> None:
        self._stream, self._rollouts, self._keeps, self._seed = stream, rollouts, KeepsGroup(advantage), seed
        self._before: Mapping[str, Any] | None = None  # the stream's state before a roll-out with refill
        self._before_ahead: Mapping[str, Any] | None = None
        self._ahead: tuple[list[Group], RolloutReport] | None = None
        self.rejected_share = 0.0
        """Share of the last step's groups that were rejected: ``RefillRule.expected_rejected`` of the next."""

    @property
    def has_ahead(self) -> bool:
        """Whether the next step's groups are already sampled."""
        return self._ahead is not None

    @property
    def asked_ahead(self) -> bool:
        """Whether the engines are sampling the next step."""
        return self._before_ahead is not None and self._ahead is None

    def leave_out(self, ledger: PassRateLedger, before: int, stage: StageConfig) -> Filtered | None:
        """Apply the filters of ``stage``, by the pass rates in the stage ``before``. None: it has no filter to apply.

        Raises NoPromptsLeft when they leave fewer prompts than a step takes.
        """
        solved = ledger.solved(before) if stage.filter_solved else frozenset()
        outside = ledger.outside(before, stage.min_pass_rate, stage.max_pass_rate) - solved
        if not stage.filter_solved and not outside:
            return None
        left = self._stream.exclude(solved | outside)
        check_prompts(stage, len(solved | outside), left)
        return Filtered(len(solved), len(outside), left)

    def take(self, stage: StageConfig) -> list[Prompt]:
        """Return the prompts that a step may need: D_R and its refill. DataError when there are fewer than D_R."""
        wanted, left = stage.prompts_per_step, self._stream.left
        extra = max(0, min(stage.refill_prompts, left - wanted))
        self._before = self._stream.state() if extra else None
        return self._stream.take(wanted + extra)

    def ask(self, prompts: Sequence[Prompt], stage: StageConfig, step: int) -> None:
        """Start the roll-out of step ``step`` (from 0)."""
        sampling = Sampling(stage.temperature, stage.top_p, stage.max_response_tokens)
        refill = None
        if len(prompts) > stage.prompts_per_step:
            refill = RefillRule(stage.prompts_per_step, self._keeps, self.rejected_share)
        seed = derive_seed(self._seed, "rollout", step)
        self._rollouts.roll_out(prompts, stage.group_size, sampling, seed, refill)

    def collect(self) -> tuple[list[Group], RolloutReport]:
        """Return the step's groups; prompts that it did not need go back to the stream."""
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
        """Start the next step's roll-out; no other may start before ``finish_ahead``."""
        self._before_ahead = self._stream.state()
        self.ask(self.take(stage), stage, step)

    def finish_ahead(self) -> RolloutReport:
        """Wait for the roll-out of ``ask_ahead``. Raises what the roll-out raises, Stopped among it."""
        self._rollouts.wait_decoded()
        self._ahead = self.collect()
        return self._ahead[1]

    def abandon_ahead(self) -> None:
        """Cancel the roll-out of ``ask_ahead`` and put its prompts back. Lost engines are only logged."""
        try:
            self._rollouts.abandon()
        except EnginesLost as error:
            logger.warning("%s", error)
        assert self._before_ahead is not None
        self._stream.restore(self._before_ahead)
        self._before = self._before_ahead = None

    def stream_state(self) -> Mapping[str, Any]:
        """Return the stream's state for the next step, whose roll-out a resumed run starts anew."""
        return self._stream.state() if self._before_ahead is None else self._before_ahead
