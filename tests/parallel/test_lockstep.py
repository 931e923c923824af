"""Lockstep on three gloo ranks: payloads reach their replicas; a failure on one rank ends all, named, without a hang.

Not proven here: the same under NCCL, where a collective does not notice a dead peer by itself.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import ranks


def run(verb: str, tmp_path: Path) -> tuple[int, str]:
    status, output = ranks.run("lockstep_worker.py", 3, verb, str(tmp_path), timeout_s=60)
    left = [pid for pid in (int(path.read_text()) for path in tmp_path.iterdir()) if psutil.pid_exists(pid)]
    assert not left, f"processes {left} outlived the run"
    return status, output


def test_payloads(tmp_path: Path) -> None:
    """1 + 1 + 1 + (0+1+2) * (1 + 2 + 3) = 21."""
    status, output = run("none", tmp_path)
    assert status == 0, output
    assert "sum 21.0" in output


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("raise", ["rank 1 failed in 'raise'", "KeyError: 'the tensor that was not there'"]),
        (
            "stall",
            ["was not finished after 3 s", "rank 1, in 'stall', is at", "time.sleep(600)", "rank 2, in 'stall', is at"],
        ),
        ("die", ["rank      : 1 (local_rank: 1)", "exitcode  : -9"]),
        ("driver dies", ["rank 0"]),
    ],
)
def test_failure_ends_all_ranks(verb: str, expected: list[str], tmp_path: Path) -> None:
    status, output = run(verb, tmp_path)
    assert status != 0
    assert "sum 21.0" in output
    for text in expected:
        assert text in output, output[-4000:]
