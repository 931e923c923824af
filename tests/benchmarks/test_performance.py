"""docs/performance.md is generated from the result files, and a result file names commit, machine, versions and limits.

Not proven here: any figure; nor that the benchmarks run (tests/selftest/test_whole.py runs benchmarks/gpu/run.sh).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import performance
import pytest
import result


def test_committed_document_is_what_the_results_generate() -> None:
    expected = performance.document(result.RESULTS)
    assert performance.DOCUMENT.read_text() == expected, (
        "run `python benchmarks/performance.py` and commit what it writes"
    )


def test_every_result_has_a_section_and_every_command_exists() -> None:
    named = {section.name for section in performance.SECTIONS}
    assert {path.stem for path in result.RESULTS.glob("*.json")} <= named | {"gpu"}
    for section in performance.SECTIONS:
        script = section.command.removeprefix("python ").split()[0]
        assert (result.ROOT / script).is_file(), f"{section.title}: {script} is not there"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.delenv("BENCHMARK_COMMIT", raising=False)
    figures = {
        "padding": result.figure(0.0131, "share", at_most=0.02),
        "planning time": result.figure(1.26, "s", at_most=1.0),
        "bit-exact": result.figure(True),
        "responses": 4096,
    }
    path = result.write_result("batching", figures, {"ranks": 32, "lengths": [0.5, 2]})
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_result_file(written: dict[str, Any]) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=result.ROOT, capture_output=True, text=True, check=True
    )
    assert written["commit"].removesuffix("+changes") == head.stdout.strip()
    assert written["figures"]["padding"] == {"value": 0.0131, "unit": "share", "limit": "≤ 2%", "met": True}
    assert written["figures"]["planning time"] == {"value": 1.26, "unit": "s", "limit": "≤ 1 s", "met": False}
    assert written["figures"]["bit-exact"] == {"value": True, "unit": "", "limit": "yes", "met": True}
    assert written["figures"]["responses"] == {"value": 4096, "unit": ""}
    assert written["versions"]["torch"] and written["versions"]["python"]
    assert "cores" in written["device"] or "GiB" in written["device"]


def test_table_of_rows(written: dict[str, Any], tmp_path: Path) -> None:
    """A missed limit is bold; a section without result says "not run" with its command; no figure is of a GPU."""
    text = performance.document(tmp_path)
    assert "| padding | 1.31% | ≤ 2% | yes |" in text
    assert "| planning time | 1.26 s | ≤ 1 s | **no** |" in text
    assert "| bit-exact | yes | yes | yes |" in text
    assert "| responses | 4,096 |  |  |" in text
    assert "Settings: ranks 32; lengths 0.5 2." in text
    assert "| recompute, floor / time | not run | ≥ 85% |  |" in text
    assert "from a machine without a GPU" in text


def test_table_of_cells(tmp_path: Path) -> None:
    """Names of the form "row: column" make a matrix. With a report of a GPU the note that there is none goes. A report
    takes the place of its own checks' figures alone, and a check that was ended early of none."""
    figures = {
        "0.5B: update": result.figure(1.5, "s"),
        "0.5B: MFU": result.figure(0.42, "share", at_least=0.5),
        "1.5B: update": result.figure("out of memory"),
    }
    outcomes = [
        {"name": "layers", "status": "not possible", "reason": "", "figures": {}},
        {"name": "kernels", "status": "failed", "reason": "ended", "figures": {"one_pass": result.figure(7.5)}},
        {"name": "throughput", "status": "failed", "reason": "too slow", "figures": figures},
    ]
    report = {
        "commit": "abc",
        "started": "2026-11-22T18:00:00",
        "machine": "1 x H200",
    }
    report |= {"versions": {"torch": "2.13.0"}, "outcomes": outcomes}
    before = {"command": "c", "commit": "old", "date": "2026-11-21", "device": "d", "versions": {}, "settings": {}}
    before["figures"] = {"one_pass": result.figure(2.5), "recompute": result.figure(3.5)}
    (tmp_path / "gpu.json").write_text(json.dumps({"throughput": before, "kernels": before}))
    (tmp_path / "selftest.json").write_text(json.dumps(report))
    keep = result.ROOT / "benchmarks/gpu/keep.py"
    subprocess.run([sys.executable, keep, tmp_path / "selftest.json", tmp_path / "gpu.json"], check=True)
    text = performance.document(tmp_path)
    assert "|  | update | MFU |\n| --- | --- | --- |\n| 0.5B | 1.5 s | 42% (≥ 50%: **no**) |" in text
    assert "| 1.5B | out of memory |  |" in text
    assert "Command: `benchmarks/gpu/run.sh throughput` at commit abc, 2026-11-22, on 1 x H200; torch 2.13.0." in text
    assert "Settings: result failed: too slow." in text
    assert "| one_pass | 2.500 |  |  |" in text and "at commit old, 2026-11-21" in text
    assert "| bit-exact | not run | yes |  |" in text
    assert "from a machine without a GPU" not in text


def test_one_limit_per_figure() -> None:
    with pytest.raises(ValueError, match="one limit per figure"):
        result.figure(1.0, at_most=2.0, at_least=0.5)
