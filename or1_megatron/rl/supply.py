"""Requests each step's rollout, with refill (dynamic sampling) or in advance (staleness); filters a stage's problems.

Refill (DAPO's dynamic sampling, decided in ``rollout.refill``): a step of a stage with ``refill_prompts`` consists of
the shortest prefix of the stream's prompts that gives D_R kept groups, at most D_R + refill_prompts prompts. The prefix
depends only on the responses, not on which engine was first or how many prompts were started early. Responses beyond
the prefix are discarded, and their prompts come in the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from or1_megatron.config.schema import AdvantageConfig, StageConfig
from or1_megatron.interfaces import ProblemStream, Rollouts
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.fatal_checks import check_prompts
from or1_megatron.rl.metrics import Filtered
from or1_megatron.rl.penalties import reward_penalties
from or1_megatron.rl.stages import PassRateLedger
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import Group, Prompt, RefillRule, RolloutReport, Sampling


@dataclass(frozen=True, slots=True)
class KeepsGroup:
    """A function that returns whether a group would be kept. It is picklable, because the RolloutManager calls it."""

    config: AdvantageConfig
    max_response_tokens: int

    def __call__(self, group: Group) -> bool:
        penalties = reward_penalties([group], self.config, self.max_response_tokens)
        kept, _ = reject(assign_advantages([group], self.config, penalties), self.config)
        return bool(kept)


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose rollout is under way."""

    before: Mapping[str, Any]
    """The stream's state before the step's prompts were drawn."""
    refilled: bool
    keeps: KeepsGroup


class Supply:
    """Requests and collects the rollouts of the current step and, where staleness is allowed, of later steps."""

    def __init__(self, stream: ProblemStream, rollouts: Rollouts, advantage: AdvantageConfig, seed: int) -> None:
        self._stream, self._rollouts, self._advantage, self._seed = stream, rollouts, advantage, seed
        self._before: Mapping[str, Any] | None = None  # the stream's state before the prompts that were taken last
        self._pending: deque[_PendingStep] = deque()  # the steps whose rollouts are under way, the oldest first
        self.rejected_share = 0.0
        """Share of the last step's groups that were rejected; the next step's ``RefillRule.expected_rejected``."""

    @property
    def requested_steps(self) -> int:
        """Return the number of steps whose rollouts are under way."""
        return len(self._pending)

    def leave_out(self, ledger: PassRateLedger, before: int, stage: StageConfig) -> Filtered | None:
        """Filter problems for ``stage`` by their pass rates in the stage ``before``; return None if no filter applies.

        Raises NoPromptsLeft when the filters leave fewer prompts than a step takes.
        """
        solved = ledger.solved(before) if stage.filter_solved else frozenset()
        outside = ledger.outside(before, stage.min_pass_rate, stage.max_pass_rate) - solved
        if not stage.filter_solved and not outside:
            return None
        left = self._stream.exclude(solved | outside)
        check_prompts(stage, len(solved | outside), left)
        return Filtered(len(solved), len(outside), left)

    def draw_prompts(self, stage: StageConfig) -> list[Prompt]:
        """Return the next step's prompts: D_R, and some for a refill. Raises DataError when fewer than D_R are left."""
        self._before = self._stream.state()
        wanted, left = stage.prompts_per_step, self._stream.left
        return self._stream.take(wanted + max(0, min(stage.refill_prompts, left - wanted)))

    def request_rollout(self, prompts: Sequence[Prompt], stage: StageConfig, step: int) -> None:
        """Start the rollout of step ``step`` (from 0). ``prompts``: the last result of ``draw_prompts``."""
        sampling = Sampling(stage.temperature, stage.top_p, stage.max_response_tokens)
        keeps, rule = KeepsGroup(self._advantage, stage.max_response_tokens), None
        if len(prompts) > stage.prompts_per_step:
            rule = RefillRule(stage.prompts_per_step, keeps, self.rejected_share)
        self._rollouts.roll_out(prompts, stage.group_size, sampling, derive_seed(self._seed, "rollout", step), rule)
        assert self._before is not None
        self._pending.append(_PendingStep(self._before, rule is not None, keeps))

    def request_ahead(self, stage: StageConfig, steps: Iterable[int]) -> None:
        """Start the rollouts of later ``steps``. None is started while a step with refill is under way, because the
        prompts after a refill are not yet known."""
        for step in steps:
            if any(pending.refilled for pending in self._pending):
                return
            self.request_rollout(self.draw_prompts(stage), stage, step)

    def collect(self) -> tuple[list[Group], RolloutReport]:
        """Wait for the oldest step's groups, and return them. Prompts that it did not need go back to the stream."""
        groups, report = self._rollouts.collect()
        step = self._pending.popleft()
        if step.refilled:
            self._stream.restore(step.before)
            self._stream.take(len(groups))
        self.rejected_share = 1 - sum(map(step.keeps, groups)) / len(groups)
        return groups, report

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state. A resumed run repeats the rollouts under way: the stream is as before them."""
        return {
            "stream": self._pending[0].before if self._pending else self._stream.state(),
            "rejected_share": self.rejected_share,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state()`` returned."""
        self._stream.restore(state["stream"])
        self.rejected_share = state.get("rejected_share", 0.0)
