"""Lockstep on three gloo ranks: payloads reach their replicas; a fault on one rank is named and ends all ranks.

Most cases run without an agent, so that only the lockstep itself can end the ranks; some run under torchrun and under
our own launcher. Not proven here: the same under NCCL, where a collective does not notice a dead peer by itself, and
over several hosts, where a connection does not break when a host goes down (heartbeats are for that).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lockstep_worker
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
        ranks.job(lockstep_worker.main, RANKS, case, folder / case, folder=folder / case, joined=False, watched=False)
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


LAUNCH = """
import sys
from or1_megatron.runtime.launch import run_ranks
sys.exit(run_ranks("lockstep_worker", sys.argv[1:], ranks=3, threads_per_rank=1, grace_s=30))
"""
LAUNCHERS = {
    "ours": ["-c", LAUNCH],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", lockstep_worker.__file__],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "case", "expected"),
    [
        ("ours", "stop 1 verb", ["training stopped: rank"]),
        ("ours", "kill 1 between", ["training stopped: rank"]),
        ("ours", "stop 0 verb", ["training stopped: rank"]),
        ("torchrun", "raise 1 verb", ["rank 1 failed in 'wait'", LOST_TENSOR]),
        ("torchrun", "stop 1 verb", [LATE, "not heard from: rank 1"]),
    ],
)
def test_a_launcher_says_why_and_leaves_nothing(tmp_path: Path, launcher: str, case: str, expected: list[str]) -> None:
    """A stopped rank cannot end itself: torchrun's agent kills it, 30 s after the others have ended."""
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], case, str(tmp_path)],
        env=ranks.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ranks.TIMEOUT_S,
    )
    assert done.returncode != 0
    for text in expected:
        assert text in done.stdout, done.stdout[-6000:]
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == RANKS and not any(map(psutil.pid_exists, pids))
