"""The self-test's processes: what ends badly is a failed check with its last lines, the others go on, nothing is left.

Not proven here: a kill of the self-test itself by SIGKILL, after which orphans of a check may stay.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import PATIENCE_S, wait_until

from or1_megatron.selftest import run_checks
from or1_megatron.selftest.one_check import Check, CheckOutcome

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def start(out: Path, *checks: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(FOLDER), str(ROOT)))}
    command = [sys.executable, str(FOLDER / "odd_checks.py"), str(out), *checks]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read(out: Path) -> Any:
    return json.loads((out / "selftest.json").read_text())


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(exit status, folder) of a run over all of them; the hanging one has two seconds."""
    out = tmp_path_factory.mktemp("odd")
    process = start(out, "crashes", "falls-short", "hangs=2", "raises", "not-here", "lacks", "passes")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (out / "selftest.json").is_file(), output
    return process.returncode, out


def test_each_ends_as_it_does(odd: Any) -> None:
    status, out = odd
    report = read(out)
    assert status == 4 and report["finished"]
    found = {outcome["name"]: (outcome["status"], outcome["reason"]) for outcome in report["outcomes"]}
    assert found == {
        "crashes": ("failed", "its process ended: killed by SIGSEGV"),
        "falls-short": ("failed", "difference is 0.500, expected ≤ 0.001; nothing is nan, expected ≤ 1.000"),
        "hangs": ("failed", "it took longer than 2 s and was ended"),
        "raises": ("failed", "ZeroDivisionError: nothing to divide by"),
        "not-here": ("not possible", "the moon is not full"),
        "lacks": ("not possible", "map: torn"),
        "passes": ("passed", ""),
    }


def test_figures_and_last_lines_are_kept(odd: Any) -> None:
    """Those before a crash are kept too; the output of a check that passed is in its log alone."""
    crashed, *_, passed = read(odd[1])["outcomes"]
    assert crashed["figures"] == {"before the crash": {"value": 7, "unit": ""}}
    assert "about to crash" in crashed["last_lines"]
    assert passed["last_lines"] == []
    assert passed["figures"]["speed of light"]["met"] and not passed["figures"]["patience"]["met"]
    assert passed["figures"]["darkness"]["value"] == "NaN"  # JSON has no such number
    assert "speed of light" in (odd[1] / "logs" / "passes.log").read_text()


def test_text(odd: Any) -> None:
    lines = (odd[1] / "selftest.txt").read_text().splitlines()
    assert "1 passed, 4 failed, 2 not possible" in lines
    crashed = next(line for line in lines if line.startswith("crashes: failed ("))
    assert crashed.endswith(" s): its process ended: killed by SIGSEGV") and "    | about to crash" in lines
    assert "  ! patience: 1 s  (expected ≥ 5 s)" in lines
    assert "  ! compass: none  (look at the sun)" in lines
    assert "    speed of light: 300,000,000 m/s  (expected ≥ 200,000,000 m/s)" in lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_the_report_and_nothing_else(number: signal.Signals, tmp_path: Path) -> None:
    """A process that has left the check's session, and whose parent has ended, is found and ended too."""
    process = start(tmp_path, "passes", "hangs", "raises")
    orphan = tmp_path / "orphan.pid"

    def started() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return orphan.is_file() and bool(orphan.read_text())

    wait_until(started, "the hanging check")
    pid = int(orphan.read_text())
    scratch = Path(psutil.Process(process.pid).children()[0].environ()["TMPDIR"])
    assert scratch.is_dir()
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert not psutil.pid_exists(pid)
    assert not scratch.exists()
    report = read(tmp_path)
    assert [outcome["name"] for outcome in report["outcomes"]] == ["passes"] and not report["finished"]
    assert "hangs: not run yet\n" in (tmp_path / "selftest.txt").read_text()


def test_without_time_left_a_check_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checks, "_stopped_by_signals", nullcontext)  # would end the other tests' processes
    report = run_checks.run_checks([Check("late", "that it comes late")], tmp_path, minutes=0.0)
    assert report.ended("failed") == ["late"]
    text = (tmp_path / "selftest.txt").read_text()
    assert "late: failed: not started, as no time was left (--minutes)" in text
    limits: list[float] = []
    monkeypatch.setattr(run_checks, "_run", lambda _, s, *more: limits.append(s) or CheckOutcome("", "passed"))
    run_checks.run_checks([Check("a", "", limit_s=60.0), Check("b", "", limit_s=6000.0)], tmp_path, minutes=5.0)
    assert limits[0] == 30 and 0 < limits[1] <= 300


def test_a_rank_asks_for_the_memory_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has set its device too; a pretended GPU has as many bytes as its number."""
    from or1_megatron.selftest import timing

    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing.torch.cuda, "mem_get_info", lambda index: (index, 8))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert timing.free_bytes() == 3
