"""What differs between nodes is named per node; where nodes meet; two real processes as two nodes.

Not proven here: several machines, torchrun's agent, Slurm.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from waiting import PATIENCE_S

from or1_megatron.commands.app import app
from or1_megatron.selftest.checks.devices import expected_rate
from or1_megatron.selftest.checks.nodes import differences, facts, mount_of
from or1_megatron.selftest.run_checks import meeting_of

ROOT = Path(__file__).parents[2]


def test_differences_are_named_per_node() -> None:
    nodes = [
        {"commit": "abc", "package torch": "2.13.0", "environment NCCL_DEBUG": "INFO"},
        {"commit": "abc", "package torch": "2.12.0", "environment NCCL_DEBUG": "INFO"},
        {"commit": "abc", "package torch": "2.13.0"},
    ]
    assert differences(nodes, ["node 0 (a)", "node 1 (b)", "node 2 (c)"]) == [
        "environment NCCL_DEBUG: 'INFO' on node 0 (a), node 1 (b); nothing on node 2 (c)",
        "package torch: '2.13.0' on node 0 (a), node 2 (c); '2.12.0' on node 1 (b)",
    ]


def test_mount_is_the_innermost_one(tmp_path: Path) -> None:
    """A later mount on the same place hides the earlier one; a folder whose name only begins alike is elsewhere."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 20 0:40 / /data rw,relatime - nfs4 server:/old rw\n"
        "31 20 0:41 / /data ro,relatime shared:7 master:1 - nfs4 server:/new rw\n"
    )
    assert mount_of("/data/runs", mounts) == "nfs4 server:/new at /data, ro"
    assert mount_of("/database", mounts) == "ext4 /dev/sda1 at /, rw"


def test_meeting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun's store is used where there is one, and none of its ranks by the checks; what is missing is named."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meeting_of(4, 3, "head", 29400) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "29400",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for options in (["--nodes", "4"], ["--nodes", "2", "--master-addr", "head"]):
        refused = CliRunner().invoke(app, ["selftest", "nodes", "--out", str(tmp_path), *options])
        assert refused.exit_code == 2 and "--node-rank, from 0 and below --nodes" in " ".join(refused.stderr.split())
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert CliRunner().invoke(app, ["selftest", "nodes", "--nodes", "4"]).exit_code == 0


def test_folders_of_the_launch_script_are_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their mounts too; a variable that names each node's own GPUs is none."""
    monkeypatch.setenv("MODEL", str(tmp_path))
    monkeypatch.delenv("RUNS", raising=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-1")
    found = facts()
    assert (found["path of MODEL"], found["mount of MODEL"]) == (str(tmp_path), mount_of(str(tmp_path)))
    assert found["environment NVIDIA_TF32_OVERRIDE"] == "0"
    assert not {"path of RUNS", "environment NVIDIA_VISIBLE_DEVICES"} & found.keys()


def test_the_networks_expected_rate() -> None:
    """60% of one adapter of 400 Gb/s; nothing is expected of what is not known."""
    assert expected_rate("NVIDIA H100 80GB HBM3", "network_bytes_per_s") == pytest.approx(30.0)
    assert expected_rate("a card of tomorrow", "network_bytes_per_s") is None


def test_two_nodes_that_differ(tmp_path: Path) -> None:
    """Two processes meet over gloo; a variable and the working directory differ. Both name both differences."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for node, debug in enumerate(("INFO", "WARN")):
        folder = tmp_path / f"work_{node}"
        folder.mkdir()
        told = {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_DEBUG": debug}
        command = [sys.executable, "-m", "or1_megatron.commands.app", "selftest", "nodes", "--nodes", "2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **told}
        processes.append(
            subprocess.Popen(
                [*command, "--out", str(tmp_path / "out")],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    host = socket.gethostname()
    for node, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 1, output
        report: Any = json.loads((tmp_path / "out" / f"node_{node}" / "selftest.json").read_text())
        (outcome,) = report["outcomes"]
        assert outcome["figures"]["facts that differ between nodes"]["value"] == 2, outcome
        assert f"environment NCCL_DEBUG: 'INFO' on node 0 ({host}); 'WARN' on node 1 ({host})" in outcome["reason"]
        assert "path of the working directory: " in outcome["reason"]
        assert outcome["figures"]["clocks apart"]["met"]
