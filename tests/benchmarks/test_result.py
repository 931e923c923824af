"""A result file names commit, machine, versions and limits; docs/performance.md names programs that are there.

Not proven here: any figure; nor that the benchmarks run (tests/selftest/test_whole.py runs benchmarks/gpu/run.sh).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import result

KEEP = result.ROOT / "benchmarks" / "gpu" / "keep.py"


def test_every_program_that_is_named_is_there() -> None:
    """By docs/performance.md, but for those that it gives with a commit, and by each result file's command."""
    page = (result.ROOT / "docs" / "performance.md").read_text()
    named = set(re.findall(r"`(?:python )?(benchmarks/[\w/]+\.(?:py|sh))[^`]*`(?! at [0-9a-f]{7})", page))
    for file in result.RESULTS.glob("*.json"):
        found = json.loads(file.read_text())
        named |= {match[0] for match in re.finditer(r"benchmarks/[\w/]+\.(py|sh)", found.get("command", ""))}
    assert len(named) > 8
    assert {name for name in named if not (result.ROOT / name).is_file()} == set()


def test_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    figures = {
        "padding": result.figure(0.0131, "share", at_most=0.02),
        "planning time": result.figure(1.26, "s", at_most=1.0),
        "bit-exact": result.figure(True),
        "responses": 4096,
    }
    path = result.write_result("packing", figures, {"ranks": 32, "lengths": [0.5, 2]})
    written: dict[str, Any] = json.loads(path.read_text())
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=result.ROOT, capture_output=True, text=True, check=True
    )
    assert written["commit"].removesuffix("+changes") == head.stdout.strip()
    assert written["figures"]["padding"] == {"value": 0.0131, "unit": "share", "limit": "≤ 2%", "met": True}
    assert written["figures"]["planning time"] == {"value": 1.26, "unit": "s", "limit": "≤ 1 s", "met": False}
    assert written["figures"]["bit-exact"] == {"value": True, "unit": "", "limit": "yes", "met": True}
    assert written["figures"]["responses"] == {"value": 4096, "unit": ""}
    assert written["settings"] == {"ranks": 32, "lengths": [0.5, 2]}
    assert written["versions"]["torch"] and written["versions"]["python"]
    assert "cores" in written["device"] or "GiB" in written["device"]


def test_figures_of_a_gpu_are_kept_check_by_check(tmp_path: Path) -> None:
    """A report takes the place of its own checks' figures alone, and a check that was ended early of none."""
    outcomes = [
        {"name": "layers", "status": "not possible", "reason": "", "figures": {}},
        {"name": "kernels", "status": "failed", "reason": "ended", "figures": {"one_pass": result.figure(7.5)}},
        {"name": "throughput", "status": "failed", "reason": "too slow", "figures": {"MFU": result.figure(0.42)}},
    ]
    report = {"commit": "abc", "started": "2026-11-22T18:00:00", "machine": "1 x H200", "versions": {"torch": "2.13.0"}}
    figures = {"one_pass": result.figure(2.5), "recompute": result.figure(3.5)}
    before = {"command": "c", "commit": "old", "date": "2026-11-21", "device": "d", "versions": {}, "settings": {}}
    before["figures"] = figures
    (tmp_path / "gpu.json").write_text(json.dumps({"throughput": before, "kernels": before}))
    (tmp_path / "selftest.json").write_text(json.dumps(report | {"outcomes": outcomes}))
    subprocess.run([sys.executable, KEEP, tmp_path / "selftest.json", tmp_path / "gpu.json"], check=True)
    assert json.loads((tmp_path / "gpu.json").read_text()) == {
        "kernels": before,
        "throughput": {
            "command": "benchmarks/gpu/run.sh throughput",
            "commit": "abc",
            "versions": {"torch": "2.13.0"},
            "date": "2026-11-22T18:00:00",
            "device": "1 x H200",
            "settings": {"result": "failed: too slow"},
            "figures": {"MFU": result.figure(0.42)},
        },
    }


def test_one_limit_per_figure() -> None:
    with pytest.raises(ValueError, match="one limit per figure"):
        result.figure(1.0, at_most=2.0, at_least=0.5)
