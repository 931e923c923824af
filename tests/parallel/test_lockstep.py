"""Lockstep on three gloo ranks: payloads reach their replicas; a fault on one rank is named and ends all ranks.

Most cases run without an agent, so that each rank must end by itself; the others run under torchrun, and under our own
launcher with its watchdog. Not proven here: the same under NCCL, where a collective does not notice a dead peer by
itself, and over several hosts, where a connection does not break when a host goes down.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lockstep_worker
import psutil
import pytest
import ranks

from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.heartbeat import beats_folder

RANKS = 3
LOST_TENSOR = "KeyError: 'the tensor that was not there'"
LATE = "'wait' was not finished after 10 s (cluster.verb_timeout_s)"

FAST: dict[str, tuple[list[int | str], set[int], list[str]]] = {
    "raise 1 verb": ([1, 1, 1], {1}, ["rank 1 failed in 'wait'", LOST_TENSOR, "rank 0 lost a peer in 'wait'"]),
    "raise 0 verb": ([1, 1, 1], set(), [LOST_TENSOR, "lost a peer in 'wait'"]),
    "sleep 1 verb": ([1, 1, 1], {0, 1, 2}, [LATE, "time.sleep(600)", "dist.barrier(mesh.control)"]),
    "kill 1 verb": ([1, -9, 1], set(), ["lost a peer in 'wait'"]),
    "kill 0 verb": ([-9, 1, 1], set(), ["lost a peer in 'wait'"]),
}
"""Case to (exit statuses by rank, ranks that may say of themselves why they end, expected output). One of those ranks
at least says it: its end is what the others may see before their own time is up."""
SLOW: dict[str, tuple[list[int | str], set[int], list[str]]] = {
    "kill 0 between": ([-9, 1, 1], set(), ["the store is gone while waiting for a verb"]),
    "sleep 0 verb": ([1, 1, 1], {0, 1, 2}, [LATE, "time.sleep(600)"]),
    "stop 1 verb": ([1, "stopped", 1], {0, 2}, [LATE]),
    "stop 0 verb": (["stopped", 1, 1], {1, 2}, [LATE]),
    "stop 0 between": (
        ["stopped", 1, 1],
        {1, 2},
        ["rank 0) has not answered for 10 s"],
    ),
}


def run_cases(folder: Path, cases: list[str]) -> dict[str, Any]:
    """Run cases side by side, with no agent to watch over their ranks; exit statuses and outputs by rank, and the
    reasons that ranks noted of themselves."""
    jobs = [
        ranks.job(lockstep_worker.main, RANKS, case, folder / case, folder=folder / case, joined=False, watched=False)
        for case in cases
    ]
    results = dict(zip(cases, ranks.run_jobs(jobs), strict=True))
    for case, result in results.items():
        result["noted"] = {fault.who: fault.why for fault in FaultRecord(folder / case).read()}
        shutil.rmtree(beats_folder(str(folder / case)), ignore_errors=True)  # of ranks that were killed
    return results


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("cases") / "fast", ["none 0 none", *FAST])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("cases") / "slow", list(SLOW))


def check(result: Any, ends: list[int | str], expected: list[str]) -> None:
    output = "\n".join(result["outputs"])
    assert result["ends"] == ends, output[-6000:]
    for text in ["sum 21.0", *expected]:
        assert text in output, f"'{text}' is not in:\n{output[-6000:]}"


def test_payloads_and_agreed_errors(fast: dict[str, Any]) -> None:
    """1 + 1 + 1 + (0+1+2) * (1 + 2 + 3) = 21, after an error that all ranks agreed on and rank 0 dealt with."""
    check(fast["none 0 none"], [0, 0, 0], ["agreed: the disk is full"])


def check_case(result: Any, case: tuple[list[int | str], set[int], list[str]]) -> None:
    ends, noted, expected = case
    check(result, ends, expected)
    assert set(result["noted"]) <= {f"rank {rank}" for rank in noted}
    assert bool(result["noted"]) == bool(noted)
    assert all(expected[0].removeprefix("rank 1 failed ") in why for why in result["noted"].values())


@pytest.mark.parametrize("case", FAST)
def test_a_fault_ends_all_ranks(fast: dict[str, Any], case: str) -> None:
    check_case(fast[case], FAST[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_a_slower_fault_ends_all_ranks(slow: dict[str, Any], case: str) -> None:
    check_case(slow[case], SLOW[case])


LAUNCH = """
import os, sys
from pathlib import Path
from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.launch import launch
from or1_megatron.runtime.watchdog import Watchdog
faults = FaultRecord(Path(sys.argv[2]))
watchdog = Watchdog(os.getpid(), sys.argv[2], 10.0, faults)
ended = launch("lockstep_worker", sys.argv[1:], ranks=3, threads_per_rank=1, grace_s=30, watchdog=watchdog)
print("ended:", ended.code, ended.how)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("raise 1 verb", ["ended: 1 rank ", "rank 1 failed in 'wait'", "another rank failed? The main thread"]),
        ("stop 1 verb", ["ended: 137 rank 1 (pid", "the last that it said: 'in 'wait''; it is killed"]),
        ("kill 1 between", ["ended: 137 rank 1 (pid"]),
        ("stop 0 between", ["ended: 137 rank 0 (pid", "stopped (state T)"]),
    ],
)
def test_a_launcher_says_why_and_leaves_nothing(tmp_path: Path, case: str, expected: list[str]) -> None:
    """A long rollout takes place while rank 0 is between two verbs."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, case, str(tmp_path)],
        env=ranks.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ranks.TIMEOUT_S,
    )
    shutil.rmtree(beats_folder(str(tmp_path)), ignore_errors=True)  # of ranks that were killed
    for text in ["sum 21.0", *expected]:
        assert text in done.stdout, f"'{text}' is not in:\n{done.stdout[-6000:]}"
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == RANKS and not any(map(psutil.pid_exists, pids))
