"""Ablations: which arms share a run, how arms differ, and what the outcomes of seeds say about a claim.

Not proven here: anything about training; ``or1 ablate N --smoke`` runs each arm of an ablation for one step.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from or1_megatron.ablate.ablation import (
    Ablation,
    Column,
    Expectation,
    arms_of,
    differences,
    load_ablation,
    load_ablations,
)
from or1_megatron.ablate.outcome import (
    ELAPSED,
    compare,
    equal_times,
    estimate,
    mean_curve,
    value_at_time,
    value_over,
    with_columns,
)
from or1_megatron.ablate.page import write_page
from or1_megatron.ablate.runs import run_all, runs_of
from or1_megatron.commands.app import app
from or1_megatron.config.load import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/ablations"
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


def test_arms_differ_in_what_they_name_and_nothing_else(found: dict[int, Ablation]) -> None:
    for ablation in found.values():
        for scale in (ablation.paper, ablation.small):
            named = {key for values in scale.arms.values() for key in values}
            differing = differences(arms_of(ablation, "paper" if scale is ablation.paper else "small"))
            assert differing
            assert all(any(key == name or key.startswith(f"{name}.") for name in named) for key in differing)


def test_an_arm_that_two_ablations_share_is_one_run(found: dict[int, Ablation]) -> None:
    """(4,64,16,1) without entropy control is in 6, 7, 9 and 10 at the small scale."""
    keys = {
        number: next(arm.key for arm in arms_of(found[number], "small") if arm.name == name)
        for number, name in {6: "(4,64,16,1)", 7: "(4,64,16,1)", 9: "off", 10: "0.20"}.items()
    }
    assert len(set(keys.values())) == 1
    seeds = [runs_of(arms_of(found[6], "small"), (1, 2), Path("out"))[i].dir for i in (0, 5)]
    assert seeds[0] != seeds[1]


def test_means_and_intervals_by_hand() -> None:
    """The mean of 1, 2, 3 is 2 and s is 1, so the half width is 4.303 * 1 / sqrt(3) = 2.484."""
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.half_width == pytest.approx(2.4843, abs=1e-4)
    assert math.isnan(estimate([1.0]).half_width)


def test_windows_are_quarters_of_the_rows_that_have_the_metric() -> None:
    rows = [{"step": step, "m": float(step)} for step in range(8)] + [{"step": 8, "other": 1.0}]
    assert value_over(rows, "m", "early") == 0.5  # of 0, 1
    assert value_over(rows, "m", "late") == 6.5  # of 6, 7
    assert value_over(rows, "m", "last") == 7.0
    assert value_over(rows, "none", "all") is None


def test_a_claim_is_judged_by_the_paired_difference() -> None:
    """Seeds differ by far more than the arms do; paired, the difference is clear. The other way round: the opposite."""
    one = {seed: [{"step": 0, "m": 10.0 * seed + 1.0 + 0.01 * seed}] for seed in (1, 2, 3)}
    other = {seed: [{"step": 0, "m": 10.0 * seed}] for seed in (1, 2, 3)}
    expected = Expectation(says="", metric="m", window="all", higher="one", than="other")
    seen = compare(expected, one, other)
    assert seen.difference.mean == pytest.approx(1.02)
    assert seen.verdict == "as claimed"
    assert compare(expected, other, one).verdict == "the opposite"
    noisy = {1: [{"step": 0, "m": 11.0}], 2: [{"step": 0, "m": 18.0}], 3: [{"step": 0, "m": 33.0}]}
    assert compare(expected, noisy, other).verdict == "not resolved"
    assert compare(expected, {1: one[1]}, other).verdict == "not run"


def test_not_lower_by_more_than_a_margin() -> None:
    """Differences of -0.02, -0.01, 0: mean -0.01, half width 4.303 * 0.01 / sqrt(3) = 0.0248."""
    higher = {seed: [{"step": 0, "m": value}] for seed, value in {1: 0.48, 2: 0.49, 3: 0.50}.items()}
    lower = {seed: [{"step": 0, "m": 0.5}] for seed in (1, 2, 3)}
    for margin, verdict in ((0.0, "not resolved"), (0.034, "not resolved"), (0.036, "as claimed")):
        expected = Expectation(says="", metric="m", window="all", higher="a", than="b", margin=margin)
        assert compare(expected, higher, lower).verdict == verdict
        assert compare(expected, lower, higher).verdict == ("as claimed" if margin else "not resolved")
    far = {seed: [{"step": 0, "m": 0.4}] for seed in (1, 2, 3)}
    expected = Expectation(says="", metric="m", window="all", higher="a", than="b", margin=0.06)
    assert compare(expected, {s: [{"step": 0, "m": 0.4 + 0.001 * s}] for s in far}, lower).verdict == "the opposite"


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
    seen = compare(expected, two, {1: slow, 2: slow}, {1: 80.0, 2: 80.0})
    assert seen.difference.mean == pytest.approx((0.175 + (0.575 + 0.7) / 2 - 0.375) / 2)
    assert compare(expected, two, {1: slow, 2: slow}).verdict == "not run"


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
    assert "0.175 | **as claimed**" in page or "0.175 ± 0.000 | **as claimed**" in page
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
    ended = list(run_all(runs))
    assert [(run.arm.name, status) for run, status in ended] == [(arms[1].name, 2)]
    assert "does not exist" in runs[1].log.read_text()


CAMPAIGN = """
import sys
from pathlib import Path
from or1_megatron.ablate.ablation import arms_of, load_ablation
from or1_megatron.ablate.runs import ArmRun, run_all, runs_of
ArmRun.command = lambda run: [sys.executable, '-c', sys.argv[1]]
arms = arms_of(load_ablation(Path(sys.argv[2])), 'small')
for run, status in run_all(runs_of(arms, (1,), Path(sys.argv[3]))):
    print('went on', status, flush=True)
"""
RUN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))
print('begun', flush=True)
time.sleep(60)
"""


def test_a_campaign_that_is_ended_ends_its_run_first(tmp_path: Path) -> None:
    """The run has time to save; no other run starts."""
    arguments = [sys.executable, "-c", CAMPAIGN, RUN, str(FOLDER / "10_clip_higher.yaml"), str(tmp_path)]
    campaign = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + PATIENCE_S
    while not any("begun" in log.read_text() for log in tmp_path.glob("runs/*.log")):
        assert time.monotonic() < deadline and campaign.poll() is None
        time.sleep(0.05)
    campaign.terminate()
    output, _ = campaign.communicate(timeout=PATIENCE_S)
    assert (campaign.returncode, output) == (128 + signal.SIGTERM, "")
    (log,) = tmp_path.glob("runs/*.log")
    assert log.read_text() == "begun\nsaved\n"


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    text = (FOLDER / "10_clip_higher.yaml").read_text()
    path = tmp_path / "10_x.yaml"
    path.write_text(text.replace('than: "0.20"', 'than: "0.19"', 1))
    with pytest.raises(ConfigError, match=r"compares \['0.19'\]; the arms are"):
        load_ablation(path)
    path.write_text(text.replace("algorithm.loss.clip_high: 0.25}", "algorithm.loss.clip_hgh: 0.25}"))
    (tmp_path / "small.yaml").write_text((FOLDER / "small.yaml").read_text())
    with pytest.raises(ConfigError, match=r"arm '0.25' \(small\).*did you mean algorithm.loss.clip_high"):
        arms_of(load_ablation(path), "small")
    path.write_text(text.replace("algorithm.loss.clip_high: 0.25}", "algorithm.loss.clip_high: 0.2}"))
    with pytest.raises(ConfigError, match=r"arms '0\.20' and '0\.25' .small. are the same"):
        arms_of(load_ablation(path), "small")


def test_the_command_lists_prints_and_refuses() -> None:
    runner = CliRunner()
    where = ["--folder", str(FOLDER)]
    assert "clip-higher" in runner.invoke(app, ["ablate", *where]).stdout
    printed = runner.invoke(app, ["ablate", "10", "--scale", "paper", "--commands", *where]).stdout.splitlines()
    assert len(printed) == 4 * 3
    assert all(line.startswith("or1 train ") and "run.seed=" in line for line in printed)
    assert "no ablation 99" in runner.invoke(app, ["ablate", "99", *where]).stderr
    assert "'big' is not one of" in runner.invoke(app, ["ablate", "10", "--scale", "big", *where]).stderr
