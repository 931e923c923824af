"""The lab: its statistics against hand-worked numbers, and one ablation through the command.

Not proven here: anything about training: a program stands in for it; nor any figure of a benchmark.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import plan_gpu
import pytest
from result import RESULTS
from typer.testing import CliRunner

from lab.ablate.__main__ import app
from lab.ablate.ablation import Column, Expectation, arms_of, differences, load_ablations
from lab.ablate.outcome import ELAPSED, ArmComparison, compare, equal_times, value_at_time, value_over, with_columns
from lab.ablate.runs import ArmRun
from lab.ablate.statistics import estimate, holm, p_value, quantile
from or1_megatron.rl.objectives.registry import objective_conflicts

ROOT = Path(__file__).parents[2]


def test_every_arm_can_run_and_differs_only_in_what_it_names() -> None:
    for ablation in load_ablations().values():
        for scale in ("paper", "small"):
            arms = arms_of(ablation, scale)  # type: ignore[arg-type]
            for arm in arms:
                for stage in arm.config.stages:
                    assert not list(objective_conflicts(arm.config.algorithm, stage)), (ablation.number, arm.name)
            named = {key for values in getattr(ablation, scale).arms.values() for key in values}
            assert all(any(f"{key}.".startswith(f"{name}.") for name in named) for key in differences(arms))


def test_students_t_against_tables_and_by_hand() -> None:
    """Published quantiles (two-sided 0.05, 0.01 and 0.001). 1, 2, 3: the mean is 2 and s is 1, so the half width is
    4.3027 / sqrt(3) = 2.4841; against 0, t = 2 sqrt(3), and with two degrees of freedom p = 1 - sqrt(12 / 14)."""
    table = {
        0.05: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042},
        0.01: {1: 63.657, 2: 9.925, 4: 4.604, 7: 3.499},
        0.001: {2: 31.599, 4: 8.610, 5: 6.869},
    }
    for level, row in table.items():
        for freedom, t in row.items():
            assert quantile(level, freedom) == pytest.approx(t, abs=6e-4)
    assert str(estimate([1.0, None, 2.0, 3.0])) == "2.000 ± 2.484"
    assert math.isnan(estimate([1.0]).half_width)
    assert p_value([1.0, 2.0, 3.0], 0.0) == pytest.approx(1 - math.sqrt(12 / 14))
    assert (p_value([1.0, 1.0], 0.5), p_value([1.0, 1.0], 1.0)) == (0.0, 1.0)


def test_holms_levels_by_hand() -> None:
    """Holm's own procedure on four hypotheses at 0.05: 0.01 <= 0.0125 and 0.012 <= 0.0167 are rejected, 0.03 > 0.025 is
    not, and then neither is 0.04, though it is below 0.05."""
    assert holm([0.04, 0.01, 0.03, 0.012]) == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])
    assert holm([]) == [] and holm([0.9]) == [0.05]


def judged(values: list[float], **bounds: Any) -> ArmComparison:
    """Judge one comparison of an arm with these values, by seed, with an arm of zeros."""
    rows = {
        "one": {seed: [{"step": 0, "m": value}] for seed, value in enumerate(values)},
        "zero": {seed: [{"step": 0, "m": 0.0}] for seed in range(9)},
    }
    return compare([Expectation(says="", metric="m", higher="one", than="zero", **bounds)], rows)[0]


def test_verdicts_by_hand() -> None:
    """The half width of -0.02, -0.01, 0 and of -0.01, 0, 0.01 is 4.303 * 0.01 / sqrt(3) = 0.0248."""
    assert judged([1.0, 1.1, 1.2]).verdict == "as claimed" and judged([-1.0, -1.1, -1.2]).verdict == "the opposite"
    assert judged([1.0, 8.0, 3.0]).verdict == "not resolved" and judged([1.0]).verdict == "not run"
    for margin, verdict in ((0.0, "not resolved"), (0.034, "not resolved"), (0.036, "as claimed")):
        assert judged([-0.02, -0.01, 0.0], margin=margin).verdict == verdict
    assert judged([-0.10, -0.11, -0.12], margin=0.06).verdict == "the opposite"
    for within, verdict in ((0.024, "not resolved"), (0.025, "no difference")):
        assert judged([-0.01, 0.0, 0.01], within=within).verdict == verdict
    assert judged([0.010, 0.0101, 0.0102], within=0.025).verdict == "as claimed"


def test_windows_columns_and_equal_time_by_hand() -> None:
    """Quarters of 0 to 7. The fast arm takes 80 s, the slow one 160 s, from 0.2 to 0.6: from 60 s to 80 s the slow one
    goes from 0.35 to 0.4, mean 0.375, and the fast one from 0.5 to 0.6."""
    rows = [{"step": step, "m": float(step)} for step in range(8)] + [{"step": 8, "other": 1.0}]
    assert [value_over(rows, "m", window) for window in ("early", "late", "all", "last")] == [0.5, 6.5, 3.5, 7.0]
    made = with_columns(
        [{"time/step": 5.0, "time/evaluate": 4.0}, {"time/step": 2.0, "m": 1.0}, {}, {"time/step": 3.0, "m": 3.0}],
        {"far": Column(metric="m", away_from=2.5), "swing": Column(metric="m")},
    )
    assert [row[ELAPSED] for row in made] == [1.0, 3.0, 3.0, 6.0]
    assert [(row.get("far"), row.get("swing")) for row in made] == [(None, None), (1.5, None), (None, None), (0.5, 2.0)]
    fast, slow = ([{ELAPSED: 0.0, "m": 0.2}, {ELAPSED: end, "m": 0.6}] for end in (80.0, 160.0))
    assert equal_times([{1: fast, 2: fast}, {1: slow}]) == {1: 80.0}
    assert value_at_time(slow, "m", 80.0) == pytest.approx(0.375)
    assert value_at_time(fast, "m", 80.0) == pytest.approx(0.55)


WRITES = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True)
if sys.argv[2] == "fail":
    sys.exit(3)
row = {"step": 1, "policy/clip_fraction_high": float(sys.argv[2]), "entropy/sampled": 0.01, "loss": 1 / 3}
(folder / "metrics.jsonl").write_text(json.dumps(row) + chr(10))
(folder / "summary.json").write_text(json.dumps({"finished": True}))
"""


def test_an_ablation_through_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program in place of `or1 train`. A condition of entry that is not met: no other run. Met: 4 arms with 5
    seeds, of which one run fails and stops no other; the same command runs that one alone. Then the page is written
    from what was kept, without a run's folder."""

    def call(clipped: str, out: str, *more: str) -> tuple[int, str, str]:
        def command(run: ArmRun) -> list[str]:
            fails = clipped == "fail" and (run.arm.name, run.seed) == ("0.25", 2)
            value = "fail" if fails else "0.02" if clipped == "fail" else clipped
            return [sys.executable, "-S", "-c", WRITES, str(run.dir), value]

        monkeypatch.setattr(ArmRun, "command", command)
        result = CliRunner().invoke(app, ["10", "--out", str(tmp_path / out), "--jobs", "2", *more])
        return result.exit_code, result.stderr, (tmp_path / out / "pages/10_clip_higher.md").read_text()

    status, errors, page = call("0.001", "unmet")
    assert status == 1 and "(early) is 0.001, expected > 0.01; its arms are not run" in errors
    assert "0.0010 | **not met** |" in page and "Not yet run" in page
    assert len(list(tmp_path.glob("unmet/runs/*/summary.json"))) == 1
    status, errors, page = call("fail", "out")
    assert status == 1 and "0.25, seed 2 failed" in errors and "0.20 5, 0.25 4, 0.265 5, 0.28 5" in page
    (failed,) = (folder for folder in tmp_path.glob("out/runs/*/") if not (folder / "summary.json").exists())
    failed.rmdir()
    status, _, page = call("0.02", "out")
    assert status == 0 and "0.25 5" in page and "0.0200 | **met** |" in page
    assert len(list(tmp_path.glob("out/kept/*.json"))) == 1 + 4 * 5
    kept = json.loads((tmp_path / f"out/kept/{failed.name}.json").read_text())
    assert set(kept["metrics"]) == {"step", "policy/clip_fraction_high", "entropy/sampled"}  # what the pages read
    assert call("fail", "moved", "--page", "--kept", str(tmp_path / "out/kept"))[2] == page
    assert (tmp_path / "moved/pages/10_clip_higher.svg").read_text().startswith("<svg")


def test_the_pages_of_performance_name_programs_that_are_there() -> None:
    """Those that it gives with a commit aside."""
    page = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "gpu_performance.md"))
    named = set(re.findall(r"`(?:python )?((?:lab/)?benchmarks/[\w/]+\.(?:py|sh))[^`]*`(?! at [0-9a-f]{7})", page))
    assert len(named) > 8
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_the_plan_is_near_what_a_gpu_measured() -> None:
    """Memory within 7%, and seconds of the model that was fitted."""
    rows = list(plan_gpu.rows(json.loads((RESULTS / "throughput.json").read_text())))
    assert len(rows) == 8
    for name, _, _, of_seconds, _, _, of_memory in rows:
        assert abs(float(of_memory.rstrip("%"))) <= 7, name
        if name.startswith("1.5B"):
            assert abs(float(of_seconds.rstrip("%"))) <= 7, name
