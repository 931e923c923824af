"""Alarms against sequences worked by hand, from both sides of each threshold.

Not proven here: that the thresholds suit a real run; the report names the signatures, not the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from or1_megatron.config.schema import SafetyConfig, StageConfig
from or1_megatron.rl.alarms import ALARMS, CALM_STEPS, Alarms, StepSeen
from or1_megatron.rl.fatal_checks import frequent_reasons
from or1_verify.types import Verdict

STAGE = StageConfig(
    name="short", steps=400, max_response_tokens=8192, prompts_per_step=64, prompts_per_update=64, group_size=16
)
SAFE = {
    "policy/grad_norm": 0.5,
    "mismatch/mean_abs": 0.01,
    "mismatch/max_abs": 1.0,
    "entropy/sampled": 0.3,
    "accuracy/all": 0.95,
    "accuracy/non_truncated": 0.95,
    "truncation/ratio": 0.4,
}


class Run:
    """Steps fed to the alarms one by one; ``raised`` are (step, alarm) as they come."""

    def __init__(self, config: SafetyConfig | None = None, dtype: str = "bfloat16") -> None:
        self.config, self.dtype = config or SafetyConfig(), dtype
        self.alarms = Alarms(self.config, dtype)
        self.step = 0
        self.raised: list[tuple[int, str]] = []
        self.texts: list[str] = []
        self.metrics: dict[str, float] = {}

    def go(self, *, stage: StageConfig = STAGE, index: int = 0, stage_step: int | None = None, **changes: float) -> Run:
        """One step; ``changes`` name metrics with __ for /."""
        self.step += 1
        row = SAFE | {name.replace("__", "/"): value for name, value in changes.items()}
        texts, self.metrics = self.alarms.look(StepSeen(self.step, index, stage_step or self.step, stage, row))
        self.raised += [(self.step, text.split("'")[1]) for text in texts]
        self.texts += texts
        return self

    def go_on(self, column: str, values: Iterable[float]) -> Run:
        for value in values:
            self.go(**{column: value})
        return self

    def restart(self) -> None:
        """As a resume does: the state goes through JSON."""
        state = json.loads(json.dumps(self.alarms.state()))
        self.alarms = Alarms(self.config, self.dtype)
        self.alarms.restore(state)


def test_a_calm_run_has_none() -> None:
    run = Run()
    for _ in range(120):
        run.go()
    assert run.raised == [] and run.metrics == {f"alarm/{name}": 0.0 for name in ALARMS}


@pytest.mark.parametrize(
    ("norms", "factor", "raised_at"),
    [
        ([1000.0], 10.0, None),  # the first ten steps are free
        ([*range(1, 12), 60.0], 10.0, None),  # 10 times the median of 6 is allowed
        ([*range(1, 12), 61.0], 10.0, 12),
        ([*range(1, 12), 61.0], 11.0, None),
        # 26 norms of 9 are most of the last 50, so the median is 9 and 80 is below 10 times it; 24 are not.
        ([1.0] * 50 + [9.0] * 26 + [80.0], 10.0, None),
        ([1.0] * 50 + [9.0] * 24 + [80.0], 10.0, 75),
    ],
)
def test_gradient_norm_against_its_median(norms: list[float], factor: float, raised_at: int | None) -> None:
    run = Run(SafetyConfig(grad_norm_factor=factor)).go_on("policy__grad_norm", norms)
    assert run.raised == ([] if raised_at is None else [(raised_at, "grad_norm")])
    if raised_at == 12:
        assert "gradient norm 61 is 10.2 times its median over the last 11 steps, 6 (" in run.texts[0]


def test_once_per_episode_and_across_a_resume() -> None:
    """High, calm for CALM_STEPS - 1 steps, high again: one episode. Calm for CALM_STEPS: the next is another."""
    run = Run().go_on("mismatch__mean_abs", [0.06, 0.06])
    run.go_on("mismatch__mean_abs", [0.01] * (CALM_STEPS - 1))
    run.restart()
    assert run.metrics["alarm/mismatch"] == 1
    run.go(mismatch__mean_abs=0.06)
    assert run.raised == [(1, "mismatch")]
    run.go_on("mismatch__mean_abs", [0.01] * CALM_STEPS)
    assert run.metrics["alarm/mismatch"] == 0
    run.go(mismatch__mean_abs=0.06)
    assert run.raised == [(1, "mismatch"), (2 + CALM_STEPS - 1 + 1 + CALM_STEPS + 1, "mismatch")]


@pytest.mark.parametrize(
    ("dtype", "mean", "largest", "config", "alarm"),
    [
        ("bfloat16", 0.05, 5.0, SafetyConfig(), False),
        ("bfloat16", 0.051, 1.0, SafetyConfig(), True),
        ("bfloat16", 0.01, 5.1, SafetyConfig(), True),
        ("float32", 1e-4, 1e-2, SafetyConfig(), False),
        ("float32", 2e-4, 1e-3, SafetyConfig(), True),
        ("float32", 1e-5, 2e-2, SafetyConfig(), True),
        ("float32", 2e-4, 2e-2, SafetyConfig(mismatch_mean=2e-4, mismatch_max=2e-2), False),
        ("bfloat16", float("nan"), 0.0, SafetyConfig(), True),
    ],
)
def test_mismatch(dtype: str, mean: float, largest: float, config: SafetyConfig, alarm: bool) -> None:
    run = Run(config, dtype).go(mismatch__mean_abs=mean, mismatch__max_abs=largest)
    assert bool(run.raised) == alarm


def test_low_entropy_names_its_likely_cause() -> None:
    assert Run().go(entropy__sampled=0.05, accuracy__all=0.5).raised == []
    assert Run().go(entropy__sampled=0.04, accuracy__all=0.9).raised == []  # learnt: nothing is left to explore
    run = Run().go(entropy__sampled=0.04, accuracy__all=0.5)
    assert run.raised == [(1, "entropy")] and "within the first 100 steps" in run.texts[0]
    assert "temperature and N_SGD are the recipe's" in run.texts[0]
    cold = STAGE.model_copy(update={"temperature": 0.6, "prompts_per_update": 16})
    text = Run().go(entropy__sampled=0.04, accuracy__all=0.5, stage=cold).texts[0]
    assert "the temperature is 0.6" in text and "N_SGD is 4" in text
    late = Run().go_on("entropy__sampled", [0.3] * 100).go(entropy__sampled=0.04, accuracy__all=0.5)
    assert late.raised == [(101, "entropy")] and "within the first" not in late.texts[0]


def trend(rise: float, fall: float, steps: int = 40, first_stage_step: int = 1) -> Run:
    """Accuracy 0.5, then 0.5 + rise; non-truncated 0.75, then 0.75 - fall: 20 steps each."""
    run = Run()
    for k in range(steps):
        new = k >= steps - 20
        run.go(
            accuracy__all=0.5 + rise * new, accuracy__non_truncated=0.75 - fall * new, stage_step=first_stage_step + k
        )
    return run


def test_accuracy_up_and_non_truncated_down() -> None:
    """0.0625 and 0.0625 are enough; a change too small on either side is not, nor are 39 steps."""
    run = trend(0.0625, 0.0625)
    assert (40, "non_truncated") in run.raised
    assert "rose from 0.500 to 0.562" in run.texts[0] and "fell from 0.750 to 0.688" in run.texts[0]
    assert "Expected in the first ~100 steps" in run.texts[0] and "T = 8192, 40.0% truncated" in run.texts[0]
    late = trend(0.0625, 0.0625, first_stage_step=200)
    assert "it is not expected" in late.texts[0]
    for other in (trend(0.0, 0.0625), trend(0.0625, 0.0), trend(0.02, 0.0625), trend(0.0625, 0.02)):
        assert other.raised == []
    assert trend(0.0625, 0.0625, steps=39).raised == []


def test_a_new_stage_begins_a_new_comparison() -> None:
    run = Run()
    for index, (everything, whole) in enumerate([(0.5, 0.75), (0.6, 0.65)]):
        for _ in range(20):
            run.go(accuracy__all=everything, accuracy__non_truncated=whole, index=index)
    assert run.raised == []


def plateau(gain: float, level: float = 0.5, steps: int = 400, index: int = 0) -> list[tuple[int, str]]:
    run = Run()
    stage = STAGE.model_copy(update={"steps": steps})
    for k in range(100):
        now = level + gain * (k >= 50)
        run.go(accuracy__all=now, accuracy__non_truncated=now, stage=stage, index=index)
    return run.raised


def test_plateau_early_in_the_first_stage() -> None:
    """A gain of 1/128 from 50 steps to the next is standing still, 1/64 is not; at 0.95 there is nothing left to gain;
    step 100 of 200 is still early, of 199 not; later stages are not watched."""
    assert plateau(1 / 128) == [(100, "plateau")] == plateau(0.0, steps=200) == plateau(-0.1)
    assert plateau(1 / 64) == plateau(0.0, level=0.95) == plateau(0.0, steps=199) == plateau(0.0, index=1) == []


def test_a_step_without_a_kept_group_is_said_with_the_reasons() -> None:
    """After the first such step, once; a verifier that only times out is one of the reasons."""
    verdicts = [
        *(Verdict(0.0, "timeout", "", f"no verdict within {n} s", 1.0) for n in (1, 2, 3)),
        Verdict(0.0, "no_answer", "", "the reasoning is never closed", 0.1),
        Verdict(1.0, "right", "4", "", 0.1),
    ]
    reasons = frequent_reasons(verdicts)
    assert reasons == "3 timeout (no verdict within # s); 1 no_answer (the reasoning is never closed)"
    alarms, said = Alarms(SafetyConfig(), "float32"), []
    for step, kept in enumerate((1.0, 0.0, 0.0), start=1):
        row = {"groups/kept": kept, "accuracy/all": 0.0}
        said += alarms.look(StepSeen(step, 0, step, STAGE, row, reasons))[0]
    assert len(said) == 1 and said[0].startswith("alarm 'rejected' at step 2: no group was kept") and reasons in said[0]


def test_steps_without_the_metric_are_passed_over() -> None:
    """No SGD step, and every response truncated: neither rule sees the step."""
    alarms = Alarms(SafetyConfig(), "float32")
    raised, metrics = alarms.look(StepSeen(1, 0, 1, STAGE, {"accuracy/all": 0.0}))
    assert raised == [] and set(metrics.values()) == {0.0}
