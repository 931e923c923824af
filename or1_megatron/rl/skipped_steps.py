"""Counts skipped SGD steps (``parallel.optimizer`` skips them) and ends the run after too many in a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from or1_megatron.interfaces import Objective, Policy
from or1_megatron.rl.objectives.whole_batch import update
from or1_megatron.types import Batch, UpdateReport
from or1_verify.errors import UserError


class TooManySkipped(UserError, RuntimeError):
    """``safety.max_skipped_in_a_row`` SGD steps in a row had a loss or gradient that is not finite."""


class UpdateGuard:
    """Makes the SGD steps, and counts the skipped SGD steps across rollout steps and resumes.

    Args:
        max_in_a_row: ``safety.max_skipped_in_a_row``.
        tell: called with a rollout step and a sentence, which it shows in the log and on the console.
        one_pass: whether the policy's output head is one-pass (``objectives.whole_batch.needs_scores``).
    """

    def __init__(self, max_in_a_row: int, policy: Policy, tell: Callable[[int, str], None], one_pass: bool) -> None:
        self._max_in_a_row, self._policy, self._tell, self._one_pass = max_in_a_row, policy, tell, one_pass
        self.in_a_row = 0
        self.total = 0

    def update(self, step: int, index: int, batch: Batch, objective: Objective) -> UpdateReport:
        """Make SGD step ``index`` (from 0) of rollout step ``step``. Raises TooManySkipped."""
        report = update(self._policy, batch, objective, self._one_pass)
        if not report.skipped:
            self.in_a_row = 0
            return report
        self.in_a_row += 1
        self.total += 1
        loss = report.sums.get("loss", math.nan) / report.token_count
        self._tell(
            step,
            f"step {step}, SGD step {index}: skipped, because the loss ({loss:.6g}) or the gradient "
            f"norm ({report.grad_norm:.6g}) is not finite; parameters and optimizer are unchanged. To repeat it, "
            "resume a copy of the run from a checkpoint before it",
        )
        if self.in_a_row >= self._max_in_a_row:
            raise TooManySkipped(
                f"{self.in_a_row} SGD steps in a row were skipped because loss or gradient was not finite "
                f"(safety.max_skipped_in_a_row = {self._max_in_a_row}), the last in step {step}. The same "
                "command resumes from the last checkpoint"
            )
        return report

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.total = state["in_a_row"], state["total"]
