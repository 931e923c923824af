"""Alarms: sentences that say what looks wrong in a step's metrics, which limit is exceeded, and what to do.

Every rule looks at every step. A raised alarm lasts until ``CALM_STEPS`` calm steps have passed; then it may recur.
The report describes these failures (RECIPE section 5) without thresholds; the thresholds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from or1_megatron.config.schema import SafetyConfig, StageConfig
from or1_megatron.schemas.metrics import ALARMS

CALM_STEPS: Final = 5
MEDIAN_STEPS: Final = 50
"""Number of steps in the running median of the gradient norm. The alarm needs at least FIRST_NORMS earlier norms."""
FIRST_NORMS: Final = 10
TREND_STEPS: Final = 20
"""The mean accuracy of the last TREND_STEPS steps is compared with the mean of the TREND_STEPS steps before them. A
mean over 20 steps of 64 prompts has a standard error of about 0.012. Noise rarely raises the alarm ``non_truncated``,
because noise moves both accuracies in the same direction, and the alarm needs opposite directions."""
TREND_CHANGE: Final = 0.03
PLATEAU_STEPS: Final = 50
PLATEAU_GAIN: Final = 0.01
LEARNT: Final = 0.9
"""Training accuracy above which low entropy and a plateau are expected, so that they raise no alarm."""
COLLAPSE_STEPS: Final = 100
"""Wrong settings make entropy fall within this many steps (the report, ablations 4 and 6)."""

_MISMATCH: Final[Mapping[str, tuple[float, float]]] = {"float32": (1e-4, 1e-2), "bfloat16": (0.05, 5.0)}
"""For each dtype, default limits of |engine - policy| log-prob, in nats: (mean, largest). Rounding, measured against
transformers: at most 2e-5 in fp32, 0.02 to 0.2 per token in bf16. Over millions of tokens the largest is far higher."""

_REMEMBERED: Final = ("stage", "policy/grad_norm", "accuracy/all", "accuracy/non_truncated")


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What the alarm rules know about one step."""

    step: int
    """Rollout step of the run, from 1."""
    stage_index: int
    stage_step: int
    """Rollout step of the stage, from 1."""
    stage: StageConfig
    metrics: Mapping[str, float]
    reasons: str = ""
    """The frequent reasons for rewards of 0 (``fatal_checks.frequent_reasons``)."""


class Alarms:
    """Applies the alarm rules to each step. Remembers the metrics of the last steps, and which alarms still last."""

    def __init__(self, config: SafetyConfig, dtype: str) -> None:
        """``dtype``: the policy's parameter dtype, which sets the default limits of the alarm ``mismatch``."""
        mean, largest = _MISMATCH[dtype]
        self._config, self._dtype = config, dtype
        self.mismatch_mean, self._largest = config.mismatch_mean or mean, config.mismatch_max or largest
        self._rules = {
            "grad_norm": self._grad_norm,
            "mismatch": self._mismatch,
            "entropy": self._entropy,
            "non_truncated": self._non_truncated,
            "plateau": self._plateau,
            "rejected": self._rejected,
        }
        assert self._rules.keys() == ALARMS.keys()
        self._rows: list[dict[str, float]] = []
        """The metrics ``_REMEMBERED`` of the last steps; a metric that a step did not measure is absent."""
        self._remaining = dict.fromkeys(ALARMS, 0)
        """For each rule, the calm steps left until its alarm ends. 0: the rule has no alarm now."""

    def look(self, seen: StepSeen) -> tuple[list[str], dict[str, float]]:
        """Return (texts of the alarms that begin now, metrics ``alarm/<name>``: 1 while an alarm lasts, else 0)."""
        row = {"stage": float(seen.stage_index), **seen.metrics}
        kept: dict[str, float] = {name: row[name] for name in _REMEMBERED if name in row}
        self._rows = [*self._rows, kept][-2 * PLATEAU_STEPS :]
        starting = []
        for name, rule in self._rules.items():
            wrong = rule(seen)
            if wrong is not None and self._remaining[name] == 0:
                starting.append(f"alarm '{name}' at step {seen.step}: {wrong}")
            self._remaining[name] = CALM_STEPS if wrong is not None else max(0, self._remaining[name] - 1)
        return starting, {f"alarm/{name}": float(left > 0) for name, left in self._remaining.items()}

    def state(self) -> dict[str, Any]:
        """Return what the rules remember, JSON-able, for a checkpoint."""
        return {"remaining": dict(self._remaining), "rows": list(self._rows)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state()`` returned. Older versions of the program saved no ``rows``."""
        self._remaining = {name: state["remaining"].get(name, 0) for name in ALARMS}
        self._rows = [dict(row) for row in state.get("rows", [])]

    def _past(self, *names: str, stage: int | None = None) -> list[tuple[float, ...]]:
        """Return the values of the metrics ``names`` in each remembered step that has them all, oldest step first.

        ``stage``: use only steps of this stage; None: steps of all stages.
        """
        rows = [row for row in self._rows if stage is None or row["stage"] == stage]
        return [tuple(row[name] for name in names) for row in rows if all(name in row for name in names)]

    def _trends(self, stage: int, half: int, *names: str) -> list[tuple[float, float]] | None:
        """Return for each metric (mean of the first half, mean of the second half) of the last 2 * ``half`` steps.

        Counts only steps of ``stage`` that have all metrics. Returns None if there are fewer than 2 * ``half`` of them.
        """
        rows = self._past(*names, stage=stage)[-2 * half :]
        if len(rows) < 2 * half:
            return None
        return [(fmean(values[:half]), fmean(values[half:])) for values in zip(*rows, strict=True)]

    def _grad_norm(self, seen: StepSeen) -> str | None:
        """Return a text if the gradient norm exceeds ``grad_norm_factor`` times its median over MEDIAN_STEPS."""
        norm = seen.metrics.get("policy/grad_norm")
        norms = [value for (value,) in self._past("policy/grad_norm")[:-1]][-MEDIAN_STEPS:]
        if norm is None or len(norms) < FIRST_NORMS:  # None: no SGD step, or all of them skipped
            return None
        usual, factor = median(norms), self._config.grad_norm_factor
        if norm <= factor * usual:
            return None
        times = f"{norm / usual:.1f} times" if usual else "far above"
        return (
            f"gradient norm {norm:.4g} is {times} its median over the last {len(norms)} steps, {usual:.4g} (alarm at "
            f"safety.grad_norm_factor = {factor:g}). The step was clipped to optimizer.clip_grad. Look at this "
            "step's responses (or1 report); if it repeats, lower optimizer.lr"
        )

    def _mismatch(self, seen: StepSeen) -> str | None:
        """Return a text if the mean or largest |engine - policy| log-prob is above its limit, or not finite."""
        mean, largest = seen.metrics.get("mismatch/mean_abs"), seen.metrics.get("mismatch/max_abs")
        within = mean is None or largest is None or (mean <= self.mismatch_mean and largest <= self._largest)
        if within or self._config.mismatch_limit == "off":
            return None
        return (
            f"the engines' log-probs differ from the policy's by {mean:.3g} nats on average and {largest:.3g} at most; "
            f"in {self._dtype} up to {self.mismatch_mean:g} and {self._largest:g} is rounding (safety.mismatch_mean, "
            "safety.mismatch_max). The responses come from another distribution than the one that is trained: `or1 "
            "doctor mismatch RUN` looks for the cause"
        )

    def _rejected(self, seen: StepSeen) -> str | None:
        """Return a text if no group was kept, so that the step trained nothing."""
        if seen.metrics.get("groups/kept", 1.0) > 0:
            return None
        right = seen.metrics.get("accuracy/all", 0.0)
        return (
            f"no group was kept, so nothing was trained; {right:.1%} of the responses were right. Rewards of 0: "
            f"{seen.reasons or 'none'}. If this repeats: other problems, a longer max_response_tokens (truncated), a "
            "longer verify.timeout_s (timeout), or a look at the responses (or1 report)"
        )

    def _entropy(self, seen: StepSeen) -> str | None:
        """Return a text if the sampled entropy is below its limit while training accuracy is below LEARNT."""
        entropy, accuracy = seen.metrics.get("entropy/sampled"), seen.metrics.get("accuracy/all")
        limit = self._config.low_entropy
        if entropy is None or accuracy is None or entropy >= limit or accuracy >= LEARNT:
            return None
        stage, causes = seen.stage, []
        if stage.temperature < 1.0:
            causes.append(f"the temperature is {stage.temperature:g} (the recipe samples at 1.0)")
        if stage.sgd_steps > 1:
            causes.append(
                f"N_SGD is {stage.sgd_steps} (off-policy steps collapse entropy: prompts_per_update = "
                "prompts_per_step and reuse = 1 make it 1)"
            )
        causes = causes or ["temperature and N_SGD are the recipe's: raise algorithm.entropy.target or delta"]
        early = f", within the first {COLLAPSE_STEPS} steps" if seen.step <= COLLAPSE_STEPS else ""
        return (
            f"entropy is {entropy:.3g} nats per token, near zero (safety.low_entropy = {limit:g}), at step "
            f"{seen.step}{early}, with an accuracy of {accuracy:.1%}: little is left to explore. "
            + "; ".join(causes)
            + ". Go back to a checkpoint from before the fall"
        )

    def _non_truncated(self, seen: StepSeen) -> str | None:
        """Return a text if, over TREND_STEPS, accuracy rises and non-truncated accuracy falls, both by TREND_CHANGE."""
        trends = self._trends(seen.stage_index, TREND_STEPS, "accuracy/all", "accuracy/non_truncated")
        if trends is None or "accuracy/non_truncated" not in seen.metrics:  # every response was truncated
            return None
        (before, now), (whole_before, whole_now) = trends
        if now - before < TREND_CHANGE or whole_before - whole_now < TREND_CHANGE:
            return None
        truncated = seen.metrics.get("truncation/ratio", math.nan)
        advice = (
            f"Expected in the first ~{COLLAPSE_STEPS} steps of a stage with a short context: wait"
            if seen.stage_step <= COLLAPSE_STEPS
            else "This long into a stage it is not expected: compare accuracy in the full context on held-out "
            "problems; if that falls too, raise max_response_tokens or go to the next stage"
        )
        return (
            f"training accuracy rose from {before:.3f} to {now:.3f} while that of non-truncated responses fell from "
            f"{whole_before:.3f} to {whole_now:.3f} (means of {TREND_STEPS} steps and the {TREND_STEPS} before): the "
            f"policy learns to be short rather than right. Step {seen.stage_step} of the stage, T = "
            f"{seen.stage.max_response_tokens}, {truncated:.1%} truncated. {advice}"
        )

    def _plateau(self, seen: StepSeen) -> str | None:
        """Return a text if accuracy rises by less than PLATEAU_GAIN over PLATEAU_STEPS in the first half of stage 1."""
        stage = seen.stage
        if seen.stage_index > 0 or 2 * seen.stage_step > stage.steps:
            return None
        trends = self._trends(0, PLATEAU_STEPS, "accuracy/all")
        if trends is None:
            return None
        ((before, now),) = trends
        if now >= LEARNT or now - before >= PLATEAU_GAIN:
            return None
        return (
            f"training accuracy stands still early in the first stage: {before:.3f}, then {now:.3f} (means of "
            f"{PLATEAU_STEPS} steps each), at step {seen.stage_step} of {stage.steps}. Either the batch is too small "
            f"({stage.prompts_per_update} prompts of {stage.group_size} responses per SGD step: raise "
            "prompts_per_update or group_size), or the data wants an audit: wrong answers, problems that are all too "
            "hard or all too easy (groups/rejected_all_wrong, groups/rejected_all_right)"
        )
