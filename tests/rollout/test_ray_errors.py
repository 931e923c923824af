"""What is said when an actor's process goes: real Rays of subprocesses, whose actors are killed in two ways.

Not proven here: nodes that are lost, and the kernel's own killer: its counters are files of the test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayError
from waiting import PATIENCE_S

from or1_megatron.rollout import ray_errors
from or1_megatron.rollout.ray_errors import KernelKills, failure_of

DRIVER = """
import os, signal, sys, time
how = sys.argv[1]
import ray
from ray.exceptions import RayError
from or1_megatron.rollout import cluster, ray_errors
from or1_megatron.rollout.ray_errors import failure_of
ray_errors._kernel.new_kills = lambda: 0  # of others' processes, perhaps
cluster.start_ray(None, "killed")

@ray.remote(num_cpus=0)
class Victim:
    def monitor(self):
        time.sleep(600)
    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def raises(self):
        raise ValueError("the reason")

victim = Victim.remote()
try:
    ray.get(getattr(victim, how).remote(), timeout=240)
except RayError as error:
    print("\\nSAID", failure_of(error).replace(chr(10), "<NEWLINE>"), flush=True)
cluster.stop_ray()
"""


def said(how: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, how],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )
    found = re.search(r"^SAID (.*)$", ended.stdout, re.MULTILINE)
    assert found is not None, ended.stdout + ended.stderr
    return found[1]


def test_rays_own_memory_monitor() -> None:
    """Its threshold so low that it is reached at once."""
    text = said("monitor", RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="50")
    assert re.fullmatch(
        r"Ray killed its process because the machine ran out of memory \([\d.]+GB of [\d.]+GB in use\): lower .*", text
    ), text
    assert "<NEWLINE>" not in text and len(text) < 300


def test_other_deaths_are_one_line_and_speak_of_no_memory() -> None:
    text = said("killed")
    assert text.startswith("its process died: ") and "memory" not in text and "<NEWLINE>" not in text, text
    assert said("raises") == "the reason"


def test_kills_are_counted_by_the_own_cgroup_where_it_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as kernels write them: v1, v2, and neither. A death that one of them counts was for memory."""
    proc, mounts = tmp_path / "proc", tmp_path / "cgroup"
    v1, v2 = mounts / "memory/job/memory.oom_control", mounts / "unified/memory.events.local"
    for file in (v1, v2, proc / "self/cgroup", proc / "vmstat"):
        file.parent.mkdir(parents=True, exist_ok=True)
    for membership, counter, before, after in (
        ("5:cpu:/\n4:memory:/job\n0::/\n", v1, "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "oom_kill 5\n"),
        ("0::/unified\n", v2, "low 0\noom 9\noom_kill 3\noom_group_kill 0\n", "oom 0\noom_kill 5\n"),
        ("0::/nowhere\n", proc / "vmstat", "nr_free 7\noom_kill 3\n", "oom_kill 5\n"),
    ):
        (proc / "self/cgroup").write_text(membership)
        (proc / "vmstat").write_text("oom_kill 1\n")
        counter.write_text(before)
        kills = KernelKills(proc, mounts)
        assert kills.new_kills() == 0
        (proc / "vmstat").write_text("oom_kill 100\n")
        counter.write_text(after)
        monkeypatch.setattr(ray_errors, "_kernel", kills)
        why = failure_of(RayError("The actor died."))
        assert why.startswith("its process died, and the kernel has just killed 2 processes for memory: lower")
        assert failure_of(RayError("The actor died.")) == "its process died: The actor died."
