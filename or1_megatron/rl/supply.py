"""Takes a step's prompts from the stream, has them sampled, and returns the groups; those of later steps too, if early.

Refill: a step of a stage with ``refill_prompts`` consists of the shortest prefix of the stream's prompts of which D_R
groups are kept, at most D_R + refill_prompts. Which prompts these are depends on the responses alone, not on which
engine was first or how many prompts were started early. Responses beyond are thrown away, and their prompts come in the
next step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.interfaces import ProblemStream, Rollouts
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.checks import check_prompts
from or1_megatron.rl.metrics import Filtered
from or1_megatron.rl.stages import PassRateLedger
from or1_megatron.rl.tail import Tail, TailReport
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import DeferRule, Group, Place, Prompt, RefillRule, RolloutReport, Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeepsGroup:
    """Whether a group would be kept. Picklable: the RolloutManager calls it."""

    config: AdvantageConfig

    def __call__(self, group: Group) -> bool:
        kept, _ = reject(assign_advantages([group], self.config), self.config)
        return bool(kept)


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose roll-out is under way."""

    before: Mapping[str, Any]
    """The stream's state before its prompts were drawn."""
    refilled: bool


class Supply:
    """The roll-outs of the current step and, where staleness is allowed, of those after it ("ahead")."""

    def __init__(
        self,
        stream: ProblemStream,
        rollouts: Rollouts,
        advantage: AdvantageConfig,
        seed: int,
        tail: Tail | None = None,
    ) -> None:
        """``tail``: what defers prompts. None: a step takes all that it asks."""
        self.tail = tail
        self._stream, self._rollouts, self._keeps, self._seed = stream, rollouts, KeepsGroup(advantage), seed
        self._before: Mapping[str, Any] | None = None  # the stream's state before the prompts that were taken last
        self._asked: deque[_PendingStep] = deque()  # the oldest first
        self._places: Sequence[Place] | None = None  # of the prompts that were taken last; None: they are new
        self.tail_report: TailReport | None = None
        """What the step that was collected last deferred; None: nothing is deferred."""
        self.rejected_share = 0.0
        """Share of the last step's groups that were rejected: ``RefillRule.expected_rejected`` of the next."""

    @property
    def asked(self) -> int:
        """Steps whose roll-outs are under way."""
        return len(self._asked)

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

    def take(self, stage: StageConfig, step: int, steps_left: int) -> list[Prompt]:
        """Return the prompts that step ``step`` (from 0) asks: D_R and its refill, or those that ``tail`` says.

        ``steps_left``: of the stage, with this one. Raises DataError when there are fewer than D_R.
        """
        self._before = self._stream.state()
        if self.tail is not None:
            drawn = self.tail.draw(self._stream, stage, self._roll_out_seed(step), step + 1, steps_left)
            self._places = [each.place for each in drawn]
            return [each.prompt for each in drawn]
        wanted, left = stage.prompts_per_step, self._stream.left
        return self._stream.take(wanted + max(0, min(stage.refill_prompts, left - wanted)))

    def drop_deferred(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Drop, with a warning, the prompts that the stage of ``checkpoint`` had drawn and not trained there.

        ``state``: the loop's in it. The next stage begins from it because the user ended that one early.
        """
        if dropped := len(state.get("deferred", [])) + len(state.get("not_asked", [])):
            logger.warning(
                "%d prompts that the previous stage had drawn and not trained (rollout.tail) are dropped: %s is in the "
                "middle of that stage, and the steps that would have trained them are left out. Later epochs draw them "
                "again",
                dropped,
                checkpoint,
            )
        if self.tail is not None:
            self.tail.clear()

    def ask(self, prompts: Sequence[Prompt], stage: StageConfig, step: int) -> None:
        """Start the roll-out of step ``step`` (from 0), whose prompts were taken last."""
        sampling = Sampling(stage.temperature, stage.top_p, stage.max_response_tokens)
        rule: RefillRule | DeferRule | None = None
        if len(prompts) > stage.prompts_per_step:
            wanted = stage.prompts_per_step
            refill = RefillRule(wanted, self._keeps, self.rejected_share)
            rule = refill if self.tail is None else self.tail.rule(wanted)
        self._rollouts.roll_out(prompts, stage.group_size, sampling, self._roll_out_seed(step), rule, self._places)
        assert self._before is not None
        self._asked.append(_PendingStep(self._before, isinstance(rule, RefillRule)))

    def ask_ahead(self, stage: StageConfig, step: int) -> bool:
        """Start the roll-out of a later step; returns whether it could.

        Which prompts it has is unknown while an earlier step with refill is under way.
        """
        if any(asked.refilled for asked in self._asked):
            return False
        self.ask(self.take(stage, step, 0), stage, step)
        return True

    def collect(self) -> tuple[list[Group], RolloutReport]:
        """Return the groups of the oldest step; prompts that it did not need go back to the stream."""
        groups, report = self._rollouts.collect()
        asked = self._asked.popleft()
        if asked.refilled:
            self._stream.restore(asked.before)
            self._stream.take(len(groups))
        self.tail_report = None if self.tail is None else self.tail.settle(report.prompts)
        self.rejected_share = 1 - sum(map(self._keeps, groups)) / len(groups)
        return groups, report

    def _roll_out_seed(self, step: int) -> int:
        return derive_seed(self._seed, "rollout", step)

    @property
    def deferred(self) -> int:
        """Prompts that are deferred."""
        return 0 if self.tail is None else len(self.tail.waiting)

    def state(self) -> dict[str, Any]:
        """JSON-able. The stream's is that before the roll-outs under way, which a resumed run asks again."""
        return {
            "stream": self._asked[0].before if self._asked else self._stream.state(),
            "rejected_share": self.rejected_share,
            **({"deferred": [], "not_asked": []} if self.tail is None else self.tail.state()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self._stream.restore(state["stream"])
        self.rejected_share = state.get("rejected_share", 0.0)
        if self.tail is not None:
            self.tail.restore(state, self._stream)
