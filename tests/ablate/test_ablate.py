"""Ablations: which arms share a run, how arms differ, and what the outcomes of seeds say about a claim.

Not proven here: anything about training; ``or1 ablate N --smoke`` runs each arm of an ablation for one step.
"""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from or1_megatron.ablate.ablation import (
    Ablation,
    Arms,
    Column,
    Condition,
    Expectation,
    arms_of,
    differences,
    load_ablation,
    load_ablations,
)
from or1_megatron.ablate.campaign import load_campaign
from or1_megatron.ablate.outcome import (
    ELAPSED,
    ArmComparison,
    compare,
    equal_times,
    mean_curve,
    measure,
    value_at_time,
    value_over,
    with_columns,
)
from or1_megatron.ablate.page import write_page
from or1_megatron.ablate.runs import ArmRun, run_all, runs_of
from or1_megatron.ablate.spent import Spent
from or1_megatron.ablate.statistics import estimate, holm, p_value, quantile
from or1_megatron.commands.app import app
from or1_megatron.config.load import ConfigError
from or1_megatron.rl.objectives.registry import objective_conflicts

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/ablations"
MODEL = "examples/quickstart/one_wording_model"
"""What the arms of 6 to 10, 13 and 14 begin with."""
PATIENCE_S = 120.0
"""How long anything may take on a busy machine."""


@pytest.fixture(scope="module")
def found() -> dict[int, Ablation]:
    return load_ablations(FOLDER)


def test_every_ablation_of_the_report_has_arms_at_both_scales(found: dict[int, Ablation]) -> None:
    assert set(range(1, 13)) <= set(found)
    for ablation in found.values():
        for scale in ("paper", "small"):
            assert len(arms_of(ablation, scale)) >= 2  # type: ignore[arg-type]  # and each is a valid configuration
        assert len(set(ablation.small.seeds)) >= 3


def test_the_objective_of_every_arm_can_be_computed(found: dict[int, Ablation]) -> None:
    for ablation in found.values():
        for arm in [*arms_of(ablation, "paper"), *arms_of(ablation, "small")]:
            for stage in arm.config.stages:
                assert not list(objective_conflicts(arm.config.algorithm, stage)), (ablation.number, arm.name)


def test_arms_differ_in_what_they_name_and_nothing_else(found: dict[int, Ablation]) -> None:
    for ablation in found.values():
        for scale in (ablation.paper, ablation.small):
            named = {key for values in scale.arms.values() for key in values}
            differing = differences(arms_of(ablation, "paper" if scale is ablation.paper else "small"))
            assert differing
            assert all(any(key == name or key.startswith(f"{name}.") for name in named) for key in differing)


def test_an_arm_that_two_ablations_share_is_one_run(found: dict[int, Ablation]) -> None:
    """(4,32,8,1) without entropy control is in 6, 7, 9 and 13 at the small scale."""
    keys = {
        number: next(arm.key for arm in arms_of(found[number], "small") if arm.name == name)
        for number, name in {6: "(4,32,8,1)", 7: "(4,32,8,1)", 9: "off", 13: "off"}.items()
    }
    assert len(set(keys.values())) == 1
    seeds = [runs_of(arms_of(found[6], "small"), (1, 2), Path("out"))[i].dir for i in (0, 5)]
    assert seeds[0] != seeds[1]


def test_means_and_intervals_by_hand() -> None:
    """The mean of 1, 2, 3 is 2 and s is 1, so the half width is 4.3027 * 1 / sqrt(3) = 2.4841."""
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.half_width == pytest.approx(2.4841, abs=1e-4)
    assert math.isnan(estimate([1.0]).half_width)


def test_windows_are_quarters_of_the_rows_that_have_the_metric() -> None:
    rows = [{"step": step, "m": float(step)} for step in range(8)] + [{"step": 8, "other": 1.0}]
    assert value_over(rows, "m", "early") == 0.5  # of 0, 1
    assert value_over(rows, "m", "late") == 6.5  # of 6, 7
    assert value_over(rows, "m", "last") == 7.0
    assert value_over(rows, "none", "all") is None


def judged(expected: Expectation, higher: dict[int, Any], lower: dict[int, Any], until: Any = None) -> ArmComparison:
    """One comparison alone: Holm's correction over one changes nothing."""
    return compare([expected], {expected.higher: higher, expected.than: lower}, until)[0]


def test_a_claim_is_judged_by_the_paired_difference() -> None:
    """Seeds differ by far more than the arms do; paired, the difference is clear. The other way round: the opposite."""
    one = {seed: [{"step": 0, "m": 10.0 * seed + 1.0 + 0.01 * seed}] for seed in (1, 2, 3)}
    other = {seed: [{"step": 0, "m": 10.0 * seed}] for seed in (1, 2, 3)}
    expected = Expectation(says="", metric="m", window="all", higher="one", than="other")
    seen = judged(expected, one, other)
    assert seen.difference.mean == pytest.approx(1.02)
    assert seen.verdict == "as claimed" and seen.corrected == seen.difference
    assert judged(expected, other, one).verdict == "the opposite"
    noisy = {1: [{"step": 0, "m": 11.0}], 2: [{"step": 0, "m": 18.0}], 3: [{"step": 0, "m": 33.0}]}
    assert judged(expected, noisy, other).verdict == "not resolved"
    assert judged(expected, {1: one[1]}, other).verdict == "not run"


def test_not_lower_by_more_than_a_margin() -> None:
    """Differences of -0.02, -0.01, 0: mean -0.01, half width 4.303 * 0.01 / sqrt(3) = 0.0248."""
    higher = {seed: [{"step": 0, "m": value}] for seed, value in {1: 0.48, 2: 0.49, 3: 0.50}.items()}
    lower = {seed: [{"step": 0, "m": 0.5}] for seed in (1, 2, 3)}
    for margin, verdict in ((0.0, "not resolved"), (0.034, "not resolved"), (0.036, "as claimed")):
        expected = Expectation(says="", metric="m", window="all", higher="a", than="b", margin=margin)
        assert judged(expected, higher, lower).verdict == verdict
        assert judged(expected, lower, higher).verdict == ("as claimed" if margin else "not resolved")
    far = {seed: [{"step": 0, "m": 0.4}] for seed in (1, 2, 3)}
    expected = Expectation(says="", metric="m", window="all", higher="a", than="b", margin=0.06)
    assert judged(expected, {s: [{"step": 0, "m": 0.4 + 0.001 * s}] for s in far}, lower).verdict == "the opposite"


def test_a_difference_within_bounds_named_beforehand_is_none() -> None:
    """Differences of -0.01, 0, 0.01: mean 0, half width 4.303 * 0.01 / sqrt(3) = 0.0248. A clear one is no none."""
    higher = {seed: [{"step": 0, "m": value}] for seed, value in {1: 0.49, 2: 0.50, 3: 0.51}.items()}
    lower = {seed: [{"step": 0, "m": 0.5}] for seed in (1, 2, 3)}
    clear = {seed: [{"step": 0, "m": 0.51 + 0.0001 * seed}] for seed in (1, 2, 3)}
    for within, verdict in ((None, "not resolved"), (0.024, "not resolved"), (0.025, "no difference")):
        expected = Expectation(says="", metric="m", window="all", higher="a", than="b", within=within)
        assert judged(expected, higher, lower).verdict == verdict
        assert judged(expected, clear, lower).verdict == "as claimed"
    with pytest.raises(ValueError, match="has a margin and within"):
        Expectation(says="x", metric="m", higher="a", than="b", margin=0.1, within=0.1)


def test_holms_levels_by_hand() -> None:
    """Holm's own procedure on four hypotheses at 0.05: 0.01 <= 0.0125 and 0.012 <= 0.0167 are rejected, 0.03 > 0.025 is
    not, and then neither is 0.04, though it is below 0.05."""
    assert holm([0.04, 0.01, 0.03, 0.012]) == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])
    assert holm([]) == [] and holm([0.9]) == [0.05]


def test_students_t_against_tables() -> None:
    """Published quantiles (two-sided 0.05, 0.01 and 0.001), and p of one hand-worked sample: 1, 2, 3 against 0 has t =
    2 sqrt(3), and with two degrees of freedom p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14)."""
    table = {
        0.05: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042},
        0.01: {1: 63.657, 2: 9.925, 4: 4.604, 7: 3.499},
        0.001: {2: 31.599, 4: 8.610, 5: 6.869},
    }
    for level, row in table.items():
        for freedom, t in row.items():
            assert quantile(level, freedom) == pytest.approx(t, abs=6e-4)
    assert p_value([1.0, 2.0, 3.0], 0.0) == pytest.approx(1 - math.sqrt(12 / 14))
    assert (p_value([1.0, 1.0], 0.5), p_value([1.0, 1.0], 1.0)) == (0.0, 1.0)


def test_of_many_comparisons_one_that_is_clear_by_chance_is_not_resolved() -> None:
    """Differences 1, 2, 3 have p = 0.074; 2, 3, 4 have t = 3 sqrt(3), p = 0.0351, below 0.05 alone; 10, 10.1, 10.2 have
    p near 0.00003. The last of the three is resolved at 0.05 / 3, then 0.0351 > 0.025 is not. The corrected interval of
    2, 3, 4 is that of level 0.025: 6.205 / sqrt(3) = 3.58, which holds 0."""
    zero = {seed: [{"step": 0, "m": 0.0}] for seed in (1, 2, 3)}
    arms = {name: {s: [{"step": 0, "m": start + step * s}] for s in (1, 2, 3)}
            for name, start, step in (("a", 0.0, 1.0), ("b", 1.0, 1.0), ("c", 9.9, 0.1))}  # fmt: skip
    family = [Expectation(says="", metric="m", window="all", higher=name, than="zero") for name in arms]
    found = compare(family, {**arms, "zero": zero})
    assert [each.verdict for each in found] == ["not resolved", "not resolved", "as claimed"]
    assert judged(family[1], arms["b"], zero).verdict == "as claimed"
    assert found[1].difference.half_width == pytest.approx(4.3027 / math.sqrt(3), abs=1e-3)
    assert found[1].corrected.half_width == pytest.approx(6.2053 / math.sqrt(3), abs=1e-3)
    unrun = compare([*family[1:2], *family[:1]], {"b": arms["b"], "zero": zero})
    assert [each.verdict for each in unrun] == ["not resolved", "not run"]  # what is not run yet counts: 0.0351 > 0.025


def test_conditions_of_entry() -> None:
    conditions = (
        Condition(says="low", arm="a", metric="m", below=0.05),
        Condition(says="swings", arm="b", metric="swing", window="all", above=1.0),
    )
    chosen = Arms(base=Path("x"), arms={"a": {}, "b": {}}, entry=conditions, columns={"swing": Column(metric="m")})
    falling = [{"step": step, "m": 1.0 / 4**step} for step in range(4)]
    low, swings = measure(chosen, {"a": falling, "b": [{"step": 0, "m": 0.0}, {"step": 1, "m": 0.9}]})
    assert (low.value, low.met, swings.value, swings.met) == (1 / 64, True, 0.9, False)
    assert "'swings' is not met: swing of arm 'b' (all) is 0.9, expected above 1" in str(swings)
    assert not any(each.met for each in measure(chosen, {}))


def test_columns_that_no_run_reports() -> None:
    """Seconds of training exclude evaluations; a row without the metric has no distance, and the swing skips it."""
    rows = [
        {"step": 0, "time/step": 5.0, "time/evaluate": 4.0},
        {"step": 1, "time/step": 2.0, "m": 1.0},
        {"step": 2, "time/step": 3.0},
        {"step": 3, "time/step": 2.5, "time/evaluate": 0.5, "m": 3.0},
    ]
    made = with_columns(rows, {"far": Column(metric="m", away_from=2.5), "swing": Column(metric="m")})
    assert [row[ELAPSED] for row in made] == [1.0, 3.0, 6.0, 8.0]
    assert [(row.get("far"), row.get("swing")) for row in made] == [(None, None), (1.5, None), (None, None), (0.5, 2.0)]
    assert "far" not in rows[1]


def test_equal_time_by_hand() -> None:
    """The fast arm takes 80 s, the slow one 160 s, and both evaluate at their ends. 0.2 to 0.6: at 60 s to 80 s the
    slow one is on its way from 0.35 to 0.4, mean 0.375; the fast one goes from 0.5 to 0.6."""
    fast = [{"step": 0, ELAPSED: 0.0, "m": 0.2}, {"step": 1, ELAPSED: 80.0, "m": 0.6}]
    slow = [{"step": 0, ELAPSED: 0.0, "m": 0.2}, {"step": 1, ELAPSED: 160.0, "m": 0.6}]
    until = equal_times([{1: fast, 2: fast}, {1: slow}])
    assert until == {1: 80.0}
    assert value_at_time(slow, "m", 80.0) == pytest.approx(0.375)
    assert value_at_time(fast, "m", 80.0) == pytest.approx(0.55)
    bent = [*fast[:1], {"step": 1, ELAPSED: 70.0, "m": 0.9}, *fast[1:]]
    at_60 = 0.2 + 0.7 * 60 / 70
    assert value_at_time(bent, "m", 80.0) == pytest.approx((10 * (at_60 + 0.9) / 2 + 10 * (0.9 + 0.6) / 2) / 20)
    assert value_at_time(fast, "none", 80.0) is None
    expected = Expectation(says="", metric="m", window="equal_time", higher="fast", than="slow")
    two = {1: fast, 2: [fast[0], {**fast[1], "m": 0.7}]}
    seen = judged(expected, two, {1: slow, 2: slow}, {1: 80.0, 2: 80.0})
    assert seen.difference.mean == pytest.approx((0.175 + (0.575 + 0.7) / 2 - 0.375) / 2)
    assert judged(expected, two, {1: slow, 2: slow}).verdict == "not run"


def test_a_page_at_equal_wall_time(found: dict[int, Ablation], tmp_path: Path) -> None:
    """The second arm takes half the time for the same curve."""
    arms = arms_of(found[15], "small")
    rows = {
        arm.name: {
            seed: [
                {
                    "step": k,
                    "evaluation/accuracy": 0.1 * k + 0.001 * seed,
                    "accuracy/all": 0.1,
                    "time/step": pace * (k > 0),
                }
                for k in range(5)
            ]
            for seed in (1, 2, 3)
        }
        for arm, pace in zip(arms, (4.0, 2.0, 3.0), strict=True)
    }
    page = write_page(found[15], "small", arms, rows, tmp_path, "or1 ablate 15").read_text()
    assert "seed 1: 8 s" in page
    assert "| on-policy | 4.000 ± 0.000 | 2.000 ± 0.000 |" in page and "| one stale | 2.000 ± 0.000 | 4.000" in page
    # On-policy, 6 s to 8 s: step 1.5 to 2, 0.175; stale: step 3 to 4, 0.35.
    assert "| 0.175 ± 0.000 | ± 0.000 | **as claimed** |" in page
    assert "by seconds of training" in (tmp_path / "15_stale_rollouts.svg").read_text()


def test_curves_are_means_with_the_range_between_seeds() -> None:
    runs = [[{"step": 1, "m": 1.0}, {"step": 2, "m": 4.0}], [{"step": 1, "m": 3.0}]]
    assert mean_curve(runs, "m") == [(1.0, 2.0, 1.0, 3.0), (2.0, 4.0, 4.0, 4.0)]


def test_the_page_says_what_was_claimed_and_what_was_not_run(found: dict[int, Ablation], tmp_path: Path) -> None:
    arms = arms_of(found[10], "small")
    metrics = found[10].watch
    rows = {
        arm.name: {
            seed: [{"step": step, **dict.fromkeys(metrics, 0.1 * i + 0.01 * seed)} for step in range(4)]
            for seed in (1, 2, 3)
        }
        for i, arm in enumerate(arms)
    }
    page = write_page(found[10], "small", arms, rows, tmp_path, "or1 ablate 10").read_text()
    assert "clip-higher" in page and "`algorithm.loss.clip_high` | 0.2 | 0.25 | 0.265 | 0.28" in page
    assert "**as claimed**" in page and "**the opposite**" in page  # 0.28 was made the best here
    assert (tmp_path / "10_clip_higher.svg").read_text().count("<polyline") == len(metrics) * len(arms)
    empty = write_page(found[10], "small", arms, {arm.name: {} for arm in arms}, tmp_path, "or1 ablate 10").read_text()
    assert "Not yet run" in empty


def test_finished_runs_are_not_repeated_and_a_failure_stops_no_other(
    found: dict[int, Ablation], tmp_path: Path
) -> None:
    """One arm is finished; the configuration of the other names a model that does not exist."""
    arms = arms_of(found[10], "small", {"model.hf": str(tmp_path / "none")})[:2]
    runs = runs_of(arms, (1,), tmp_path)
    runs[0].dir.mkdir(parents=True)
    (runs[0].dir / "summary.json").write_text(json.dumps({"finished": True}))
    ended = list(run_all(runs, Spent(tmp_path)))
    assert [(run.arm.name, status) for run, status in ended] == [(arms[1].name, 2)]
    assert "does not exist" in runs[1].log.read_text()


def test_arms_run_only_where_the_condition_of_entry_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the command, with a program in place of `or1 train` that writes the metrics of a run. Not met: the run
    with the entry's seed and no other; then, where it is met, all arms, and the page says so."""
    for name in ("10_clip_higher.yaml", "one_wording.yaml", "small.yaml", "paper.yaml"):
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace("../recipes/or1_7b.yaml", "or1_7b"))
    clips = load_ablation(tmp_path / "10_clip_higher.yaml").small.entry[0]
    writes = (
        "import json, pathlib, sys; folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True); "
        "row = {'step': 1, 'policy/clip_fraction_high': float(sys.argv[2]), 'entropy/sampled': 0.01}; "
        "(folder / 'metrics.jsonl').write_text(json.dumps(row) + chr(10)); "
        "(folder / 'summary.json').write_text(json.dumps({'finished': True}))"
    )
    for clipped, status, runs in (("0.001", 1, 1), ("0.02", 0, 1 + 4 * 5)):
        monkeypatch.setattr(
            ArmRun, "command", lambda run, clipped=clipped: [sys.executable, "-S", "-c", writes, str(run.dir), clipped]
        )
        out = tmp_path / clipped
        result = CliRunner().invoke(app, ["ablate", "10", "--folder", str(tmp_path), "--out", str(out)])
        assert result.exit_code == status
        assert len(list(out.glob("runs/*/summary.json"))) == runs
        assert len(list(out.glob("runs/*_seed_101/summary.json"))) == 1
        page = (out / "pages/10_clip_higher.md").read_text()
        assert ("0.0010 | **not met** |" in page) == bool(status) and ("Not yet run" in page) == bool(status)
        expected = f"policy/clip_fraction_high of arm '0.20' ({clips.window}) is 0.001, expected above {clips.above};"
        assert (expected in result.stderr) == bool(status)


CAMPAIGN = """
import sys
from pathlib import Path
from or1_megatron.ablate.ablation import arms_of, load_ablation
from or1_megatron.ablate.runs import ArmRun, run_all, runs_of
from or1_megatron.ablate.spent import Spent
ArmRun.command = lambda run: [sys.executable, '-c', sys.argv[1]]
arms = arms_of(load_ablation(Path(sys.argv[2])), 'small')
for run, status in run_all(runs_of(arms, (1,), Path(sys.argv[3])), Spent(Path(sys.argv[3])), (), int(sys.argv[4])):
    print('went on', status, flush=True)
"""
RUN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))
print('begun', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_campaign_that_is_ended_ends_its_runs(how: signal.Signals, at_once: int, tmp_path: Path) -> None:
    """The runs have time to save; no other run starts. On SIGTERM the campaign waits for them and counts their
    seconds."""
    arguments = [sys.executable, "-c", CAMPAIGN, RUN, str(FOLDER / "10_clip_higher.yaml"), str(tmp_path), str(at_once)]
    campaign = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + PATIENCE_S

    def logged(text: str) -> bool:
        return sum(text in log.read_text() for log in tmp_path.glob("runs/*.log")) == at_once

    while not logged("begun"):
        assert time.monotonic() < deadline and campaign.poll() is None
        time.sleep(0.05)
    campaign.send_signal(how)
    output, _ = campaign.communicate(timeout=PATIENCE_S)
    killed = how == signal.SIGKILL
    assert (campaign.returncode, output) == (-how if killed else 128 + how, "")
    while killed and not logged("saved"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [log.read_text() for log in tmp_path.glob("runs/*.log")] == ["begun\nsaved\n"] * at_once
    spent = tmp_path / "spent.jsonl"
    assert (len(spent.read_text().splitlines()) if spent.exists() else 0) == at_once * (not killed)


MEETS = """
import json, pathlib, sys, time
folder, patience = pathlib.Path(sys.argv[1]), float(sys.argv[2])
folder.mkdir(parents=True)
running = [path for path in folder.parent.glob('*/') if not (path / 'summary.json').exists() and path != folder]
(folder / 'met').write_text(str(len(running)))
while patience and not any(path.read_text() == '1' for path in folder.parent.glob('*/met')):
    patience -= 0.05
    time.sleep(0.05)
time.sleep(0.3)
(folder / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'time/step': 1.0}) + chr(10))
(folder / 'summary.json').write_text(json.dumps({'finished': True}))
"""


@pytest.mark.parametrize(("number", "together"), [(12, True), (15, False), (2, False)])
def test_runs_share_the_machine_unless_seconds_are_compared(
    number: int, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two jobs. Programs stand in for the training: where runs may share the machine, the first waits for one
    beside it. What 12 spends is half the sum of its runs."""
    patience = str(PATIENCE_S if together else 0)
    monkeypatch.setattr(ArmRun, "command", lambda run: [sys.executable, "-S", "-c", MEETS, str(run.dir), patience])
    (tmp_path / "ablations").mkdir()
    for path in set(FOLDER.glob("*.yaml")) - {FOLDER / "campaign.yaml"}:
        text = path.read_text().replace("../recipes/", f"{FOLDER.parent}/recipes/")
        (tmp_path / "ablations" / path.name).write_text(text)
    told = ["ablate", str(number), "--folder", str(tmp_path / "ablations"), "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, [*told, "--jobs", "2"])
    assert ended.exit_code == 0, ended.output
    met = [path.read_text() for path in tmp_path.glob("out/runs/*/met")]
    assert len(met) == 3 * len(arms_of(load_ablations(FOLDER)[number], "small"))
    assert ("1" in met) == together and set(met) <= {"0", "1"}


def test_what_is_kept_of_a_run_is_what_was_read_of_it(found: dict[int, Ablation], tmp_path: Path) -> None:
    """Rows with gaps, to six digits, without the metrics that nothing reads."""
    (run,) = runs_of(arms_of(found[10], "small")[:1], (1,), tmp_path)
    run.dir.mkdir(parents=True)
    rows = [{"step": 0, "evaluation/accuracy": 0.25}, {"step": 1, "entropy/sampled": 1 / 3, "loss": 2.0}]
    (run.dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = ["step", "entropy/sampled", "evaluation/accuracy", "reward/mean"]
    run.keep(metrics)
    assert not run.kept.exists()  # it is not finished
    (run.dir / "summary.json").write_text(json.dumps({"finished": True}))
    run.keep(metrics)
    assert run.rows() == [{"step": 0, "evaluation/accuracy": 0.25}, {"step": 1, "entropy/sampled": 0.333333}]
    assert set(found[10].metrics()) >= {"entropy/sampled", "policy/clip_fraction_high", "evaluation/accuracy"}


def test_a_campaign_makes_what_its_arms_name(
    found: dict[int, Ablation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ablation 5 begins with a drifted policy, 6 with a model that is in the repository, and 1 needs all three sets."""
    campaign = load_campaign(FOLDER, found)
    assert set(campaign.order) == set(found)
    monkeypatch.chdir(tmp_path)
    needed = {number: set(campaign.missing(arms_of(found[number], "small"))) for number in (1, 5, 6)}
    data = "runs/ablation_data/heldout.jsonl"
    assert needed[1] == {data, "runs/quickstart_data/train.jsonl", "runs/ablation_loose/train.jsonl"}
    assert needed[5] == {data, "runs/ablations/drifted/hf"} and needed[6] == {data}
    assert not campaign.missing(arms_of(found[6], "paper"))
    (tmp_path / data).parent.mkdir(parents=True)
    (tmp_path / data).touch()
    assert not campaign.missing(arms_of(found[6], "small"))


def test_a_campaign_within_its_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ablations that share an arm, in the file's order, through the command; programs stand in for the training and
    for the model's making. Without hours left nothing begins; with an hour everything runs, once, and an hour that is
    spent by earlier calls is not there any more."""
    for name in ("10_clip_higher.yaml", "14_steered_clip_high.yaml", "one_wording.yaml", "small.yaml", "paper.yaml"):
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace("../recipes/or1_7b.yaml", "or1_7b"))
    made, order = tmp_path / "makes", tmp_path / "order"
    (tmp_path / "campaign.yaml").write_text(
        f"order: [14, 10]\nmakes: {{{MODEL}: mkdir -p {MODEL}; echo made >> {made}}}\n"
    )
    writes = (
        "import json, pathlib, sys; folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True); "
        "row = {'step': 1, 'policy/clip_fraction_high': 0.02, 'entropy/sampled': 0.01}; "
        "open(sys.argv[2], 'a').write(folder.name + chr(10)); "
        "(folder / 'metrics.jsonl').write_text(json.dumps(row) + chr(10)); "
        "(folder / 'summary.json').write_text(json.dumps({'finished': True}))"
    )
    monkeypatch.setattr(ArmRun, "command", lambda run: [sys.executable, "-S", "-c", writes, str(run.dir), str(order)])
    monkeypatch.chdir(tmp_path)
    told = ["ablate", "--all", "--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    printed = CliRunner().invoke(app, [*told, "--commands"]).stdout.splitlines()
    assert len(printed) == 1 + 24 and printed[0].startswith("mkdir") and "_seed_101" in printed[1]
    refused = CliRunner().invoke(app, [*told, "--hours", "0"])
    assert (refused.exit_code, order.exists(), made.exists()) == (1, False, False)
    assert "the hours are used up" in refused.stderr
    ended = CliRunner().invoke(app, [*told, "--hours", "1"])
    assert ended.exit_code == 0, ended.output
    names = order.read_text().split()
    assert len(names) == len(set(names)) == 1 + 3 * 3 + (4 * 5 - 2 * 3) == 24  # two arms are in both, with seeds 1 to 3
    first = arms_of(load_ablation(tmp_path / "14_steered_clip_high.yaml"), "small")
    assert names[0] == f"{first[0].key}_seed_101"
    assert set(names[1:10]) == {run.dir.name for run in runs_of(first, (1, 2, 3), tmp_path)}
    assert not CliRunner().invoke(app, [*told, "--commands"]).stdout.strip(), "nothing is left to run"
    assert made.read_text() == "made\n" and "20 of 20" in ended.stdout and "9 of 9" in ended.stdout
    spent = [json.loads(line)["run"] for line in (tmp_path / "out/kept/spent.jsonl").read_text().splitlines()]
    assert spent == [MODEL, *names]
    # Another machine has what was kept, and no run's folder: nothing is made or repeated, and the pages are the same.
    (tmp_path / MODEL).rmdir()
    moved = [*told[:-1], str(tmp_path / "moved"), "--kept", str(tmp_path / "out/kept")]
    assert CliRunner().invoke(app, [*moved, "--hours", "0"]).exit_code == 0
    assert len(order.read_text().split()) == len(names)
    for page in (tmp_path / "out/pages").glob("*.md"):
        assert (tmp_path / "moved/pages" / page.name).read_text() == page.read_text()
    (tmp_path / "out/kept/spent.jsonl").write_text(json.dumps({"run": "before", "seconds": 3600.0}) + "\n")
    (tmp_path / "out/runs" / names[-1] / "summary.json").unlink()
    (tmp_path / "out/kept" / f"{names[-1]}.json").unlink()
    assert CliRunner().invoke(app, [*told, "--hours", "1"]).exit_code == 1
    assert len(order.read_text().split()) == len(names)


def test_what_is_wrong_with_a_campaign_is_said(tmp_path: Path) -> None:
    assert load_campaign(tmp_path, [3, 1]).order == (3, 1)
    for text, expected in (
        ("order: [6, 99]", r"order: \[6, 99\]; expected some of \[6, 9\], each once"),
        ("order: [6, 6]", "each once"),
        ("order: []", "order"),
        ("ordre: [6]", "ordre"),
    ):
        (tmp_path / "campaign.yaml").write_text(text)
        with pytest.raises(ConfigError, match=f"campaign.yaml: .*{expected}|campaign.yaml: {expected}"):
            load_campaign(tmp_path, [6, 9])


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    text = (FOLDER / "10_clip_higher.yaml").read_text()
    path = tmp_path / "10_x.yaml"
    path.write_text(text.replace('than: "0.20"', 'than: "0.19"', 1))
    with pytest.raises(ConfigError, match=r"compares \['0.19'\]; the arms are"):
        load_ablation(path)
    path.write_text(text.replace('arm: "0.20"', 'arm: "0.19"').replace("seeds: [1,", "seeds: [101,"))
    with pytest.raises(
        ConfigError, match=r"(?s)measured on '0.19'; the arms are.*entry_seed = 101 is one of the seeds"
    ):
        load_ablation(path)
    path.write_text(re.sub(", above: [0-9.]+", "", text))
    with pytest.raises(
        ConfigError, match="names neither above nor below; expected a bound of policy/clip_fraction_high"
    ):
        load_ablation(path)
    path.write_text(text.replace("algorithm.loss.clip_high: 0.25}", "algorithm.loss.clip_hgh: 0.25}"))
    for name in ("small.yaml", "one_wording.yaml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    with pytest.raises(ConfigError, match=r"arm '0.25' \(small\).*did you mean algorithm.loss.clip_high"):
        arms_of(load_ablation(path), "small")
    path.write_text(text.replace("algorithm.loss.clip_high: 0.25}", "algorithm.loss.clip_high: 0.2}"))
    with pytest.raises(ConfigError, match=r"arms '0\.20' and '0\.25' .small. are the same"):
        arms_of(load_ablation(path), "small")


def test_the_command_lists_prints_and_refuses(tmp_path: Path) -> None:
    runner = CliRunner()
    where = ["--folder", str(FOLDER), "--out", str(tmp_path)]
    assert "clip-higher" in runner.invoke(app, ["ablate", *where]).stdout
    printed = runner.invoke(app, ["ablate", "10", "--scale", "paper", "--commands", *where]).stdout.splitlines()
    assert len(printed) == 4 * 3
    small = runner.invoke(app, ["ablate", "10", "--commands", *where]).stdout.splitlines()
    printed_small = [line for line in small if line.startswith("or1 train ")]  # after what makes what is missing
    assert len(printed_small) == 1 + 4 * 5 and "run.seed=101" in printed_small[0]  # the condition of entry comes first
    assert all(line.startswith("or1 train ") and "run.seed=" in line for line in printed)
    assert "no ablation 99" in runner.invoke(app, ["ablate", "99", *where]).stderr
    assert "10 and --all: give one of the two" in runner.invoke(app, ["ablate", "10", "--all", *where]).stderr
    assert "'big' is not one of" in runner.invoke(app, ["ablate", "10", "--scale", "big", *where]).stderr
