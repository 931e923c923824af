"""Lockstep on three gloo ranks: payloads reach their replicas; a fault on one rank is named and ends all ranks.

Most cases run without an agent, so that only the lockstep itself can end the ranks; some run under torchrun and under
our own launcher. Not proven here: the same under NCCL, where a collective does not notice a dead peer by itself, and
over several hosts, where a connection does not break when a host goes down (heartbeats are for that).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks

RANKS = 3
LOST_TENSOR = "KeyError: 'the tensor that was not there'"
GONE = "rank 0 is gone while waiting for a verb | rank 0, which hosts the store, is gone"
LATE = "'wait' was not finished after 6 s (cluster.verb_timeout_s)"

FAST: dict[str, tuple[list[int | str], set[int], list[str]]] = {
    "raise 1 verb": ([1, 1, 1], {0, 2}, ["rank 1 failed in 'wait'", LOST_TENSOR]),
    "raise 0 verb": ([1, 1, 1], {0, 1, 2}, [LOST_TENSOR, "where the ranks were", "barrier"]),
    "sleep 1 verb": ([1, 1, 1], {0, 1, 2}, [LATE, "time.sleep(600)"]),
    "kill 1 verb": ([1, -9, 1], {0, 2}, ["lost a peer in 'wait'", "not heard from: rank 1"]),
    "kill 0 verb": ([-9, 1, 1], {1, 2}, ["rank 0, which hosts the store, is gone"]),
}
"""Case to (exit statuses by rank, ranks that are reported to wait in the verb, other expected output, of which " | "
separates what one or the other of two threads says)."""
SLOW: dict[str, tuple[list[int | str], set[int], list[str]]] = {
    "kill 1 between": ([1, -9, 1], set(), ["rank 1 gave no sign of life for 6 s between two verbs", "time.sleep(600)"]),
    "kill 0 between": ([-9, 1, 1], set(), [GONE]),
    "sleep 0 verb": ([1, 1, 1], {0, 1, 2}, [LATE, "time.sleep(600)"]),
    "stop 1 verb": ([1, "stopped", 1], {0, 2}, [LATE, "not heard from: rank 1"]),
    "stop 0 verb": (["stopped", 1, 1], {1, 2}, [LATE, "rank 0, which hosts the store, has not answered"]),
    "stop 1 between": ([1, "stopped", 1], set(), ["rank 1 gave no sign of life for 6 s between two verbs"]),
}


def waiting(output: str) -> set[int]:
    """Return the ranks that the output reports in the verb: "rank 1, in 'wait'", "ranks 0, 3-5, in 'wait'"."""
    found: set[int] = set()
    for ranks_said in re.findall(r"\branks? ([\d, -]+), in 'wait'", output):
        for part in ranks_said.split(", "):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def run_cases(folder: Path, cases: list[str]) -> dict[str, Any]:
    """Run cases side by side, with no agent to watch over their ranks; exit statuses and outputs by rank."""
    jobs = [
        ranks.job("lockstep_worker.py", RANKS, case, str(folder / case), folder=folder / case, watched=False)
        for case in cases
    ]
    return dict(zip(cases, ranks.run_jobs(jobs), strict=True))


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("cases") / "fast", ["none 0 none", *FAST])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("cases") / "slow", list(SLOW))


def check(result: Any, ends: list[int | str], waited: set[int], expected: list[str]) -> None:
    output = "\n".join(result["outputs"])
    assert result["ends"] == ends, output[-6000:]
    assert waiting(output) >= waited, output[-6000:]
    for text in ["sum 21.0", *expected]:
        assert any(either in output for either in text.split(" | ")), f"'{text}' is not in:\n{output[-6000:]}"


def test_payloads_and_agreed_errors(fast: dict[str, Any]) -> None:
    """1 + 1 + 1 + (0+1+2) * (1 + 2 + 3) = 21, after an error that all ranks agreed on and rank 0 dealt with."""
    check(fast["none 0 none"], [0, 0, 0], set(), ["agreed: the disk is full"])


@pytest.mark.parametrize("case", FAST)
def test_a_fault_ends_all_ranks(fast: dict[str, Any], case: str) -> None:
    check(fast[case], *FAST[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_a_slower_fault_ends_all_ranks(slow: dict[str, Any], case: str) -> None:
    check(slow[case], *SLOW[case])


def left_over(folder: Path) -> list[int]:
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == RANKS
    return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_a_traceback_comes_through_torchrun(tmp_path: Path) -> None:
    status, output = ranks.run("lockstep_worker.py", RANKS, "raise 1 verb", str(tmp_path))
    assert status != 0
    assert waiting(output) >= {0, 2}
    for text in ("rank 1 failed in 'wait'", LOST_TENSOR):
        assert text in output, output[-6000:]
    assert left_over(tmp_path) == []


LAUNCH = """
import sys
from or1_megatron.runtime.launch import run_ranks
sys.exit(run_ranks("lockstep_worker", sys.argv[1:], ranks=3, threads_per_rank=1, grace_s=30))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stop 1 verb", "kill 1 between", "stop 0 verb"])
def test_our_launcher_leaves_nothing(tmp_path: Path, case: str) -> None:
    """A stopped rank cannot end itself: torchrun's agent kills it, 30 s after the others have ended."""
    path = os.pathsep.join([str(ranks.FOLDER), str(ranks.ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCH, case, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ranks.TIMEOUT_S,
    )
    assert done.returncode != 0
    assert "training stopped: rank" in done.stdout, done.stdout[-6000:]
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_torchrun_kills_a_stopped_rank(tmp_path: Path) -> None:
    status, output = ranks.run("lockstep_worker.py", RANKS, "stop 1 verb", str(tmp_path))
    assert status != 0
    assert LATE in output and "not heard from: rank 1" in output, output[-6000:]
    assert left_over(tmp_path) == []
