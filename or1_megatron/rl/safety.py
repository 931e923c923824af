"""SGD steps that fail. One whose loss or gradient is not finite is counted and dumped; too many in a row end the run.

One that raises is dumped, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from or1_megatron.config.schema import SafetyConfig
from or1_megatron.interfaces import Objective, Policy
from or1_megatron.rl.dump import WEIGHTS, DumpStore, Reason, UpdateDump
from or1_megatron.rl.objectives.scored import update
from or1_megatron.types import Batch, Float32Array, UpdateReport
from or1_verify.errors import UserError


class TooManySkipped(UserError, RuntimeError):
    """``safety.max_skipped_in_a_row`` SGD steps in a row had no finite loss or gradient."""


@dataclass(frozen=True, slots=True)
class SgdStep:
    """One SGD step: number ``index`` (from 0) of rollout step ``step``."""

    step: int
    index: int
    batch: Batch
    objective: Objective


@dataclass(frozen=True, slots=True)
class _Aside:
    """The parts of a dump that need the parameters before the update: log-probs here, weights in the folder."""

    folder: Path
    reason: Reason
    log_probs: tuple[Float32Array, ...]


class UpdateGuard:
    """Makes the SGD steps, and counts skipped ones over rollout steps and resumes.

    Args:
        dumps: where batches are dumped; None: nowhere.
        tell: takes a sentence for the log and the console.
        one_pass: the policy's head is one-pass.
    """

    def __init__(
        self,
        config: SafetyConfig,
        policy: Policy,
        dumps: DumpStore | None,
        tell: Callable[[str], None],
        one_pass: bool = False,
    ) -> None:
        self._config, self._policy, self._dumps, self._tell = config, policy, dumps, tell
        self._one_pass = one_pass
        self.in_a_row = 0
        self.total = 0
        self._dumped: list[str] = []
        """Dumps of the skipped steps in a row."""

    def update(self, sgd_step: SgdStep) -> UpdateReport:
        """Make the step, and dump it when it was skipped, raised or is in ``safety.dump_steps``.

        Raises TooManySkipped, naming the dumps, when ``safety.max_skipped_in_a_row`` is reached.
        """
        aside = self._set_aside(sgd_step, "asked") if sgd_step.step in self._config.dump_steps else None
        try:
            report = update(self._policy, sgd_step.batch, sgd_step.objective, self._one_pass)
        except Exception as error:
            self._keep_raised(aside, sgd_step, error)
            raise
        if not report.skipped:
            self.in_a_row, self._dumped = 0, []
            self._keep(aside, sgd_step, report)
            return report
        self.in_a_row += 1
        self.total += 1
        if aside is None and self._config.keep_dumps > 0:  # the update was skipped: the parameters are unchanged
            aside = self._set_aside(sgd_step, "skipped")
        dump = self._keep(aside, sgd_step, report)
        self._tell_skipped(sgd_step, report, dump)
        return report

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "total": self.total, "dumped": list(self._dumped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.in_a_row, self.total, self._dumped = state["in_a_row"], state["total"], list(state["dumped"])

    def _set_aside(self, sgd_step: SgdStep, reason: Reason) -> _Aside | None:
        """Start a dump; None when there is no place for it."""
        if self._dumps is None:
            return None
        # Score first: a policy that shares its GPUs with engines loads its weights for it, and the export needs them.
        log_probs = self._policy.score(sgd_step.batch, sgd_step.objective.temperature).log_probs
        try:
            folder = self._dumps.open(sgd_step.step, sgd_step.index)
            if self._config.dump_weights:
                self._policy.export_hf(folder / WEIGHTS)
        except OSError as error:
            self._tell_lost(self._dumps, sgd_step, error)
            return None
        return _Aside(folder, reason, log_probs)

    def _keep_raised(self, aside: _Aside | None, sgd_step: SgdStep, error: Exception) -> None:
        """Dump the batch, alone unless more is there: the ranks, which end, can neither score it nor export weights."""
        if self._dumps is None or (aside is None and self._config.keep_dumps == 0):
            return
        unknown = math.nan
        report = UpdateReport({"loss": unknown}, sgd_step.batch.token_count, unknown, unknown, False, 0.0, 0.0)
        try:
            aside = aside or _Aside(self._dumps.open(sgd_step.step, sgd_step.index), "raised", ())
        except OSError as lost:
            self._tell_lost(self._dumps, sgd_step, lost)
            return
        self._keep(aside, sgd_step, report, f"{type(error).__name__}: {error}")

    def _keep(self, aside: _Aside | None, sgd_step: SgdStep, report: UpdateReport, raised: str = "") -> Path | None:
        """Complete the dump and return its folder; None when there is none."""
        if self._dumps is None or aside is None:
            return None
        dump = UpdateDump(
            step=sgd_step.step,
            update=sgd_step.index,
            reason=aside.reason,
            objective=sgd_step.objective,
            samples=sgd_step.batch.samples,
            token_count=sgd_step.batch.token_count,
            report=report,
            log_probs=aside.log_probs,
            context=self._dumps.context,
            raised=raised,
        )
        try:
            return self._dumps.close(aside.folder, dump)
        except OSError as error:
            self._tell_lost(self._dumps, sgd_step, error)
            return None

    def _tell_lost(self, dumps: DumpStore, sgd_step: SgdStep, error: OSError) -> None:
        """Report a dump that could not be written; the run continues without it."""
        dumps.delete_partial()
        self._tell(f"step {sgd_step.step}: the batch could not be dumped, training continues: {error}")

    def _tell_skipped(self, sgd_step: SgdStep, report: UpdateReport, dump: Path | None) -> None:
        if dump is not None:
            self._dumped.append(str(dump))
        loss = report.sums.get("loss", math.nan) / report.token_count
        said = (
            f"step {sgd_step.step}, SGD step {sgd_step.index}: skipped, because the loss ({loss:.6g}) or the gradient "
            f"norm ({report.grad_norm:.6g}) is not finite; parameters and optimizer are unchanged"
        )
        said += "; no dump of it was kept" if dump is None else f". To repeat it: or1 replay {dump}"
        self._tell(said)
        if self.in_a_row >= self._config.max_skipped_in_a_row:
            dumps = [folder for folder in self._dumped if Path(folder).is_dir()]
            raise TooManySkipped(
                f"{self.in_a_row} SGD steps in a row were skipped because loss or gradient was not finite "
                f"(safety.max_skipped_in_a_row = {self._config.max_skipped_in_a_row}), the last in step "
                f"{sgd_step.step}. "
                + (f"Dumps: {', '.join(dumps)}; repeat one with or1 replay" if dumps else "No dump was kept")
                + ". The same command resumes from the last checkpoint"
            )
