"""Ranks of two nodes compare what they start with, over gloo. Not proven here: several machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks

from or1_megatron.config.load import load_config
from or1_megatron.parallel.mesh import stop_process_group
from or1_megatron.trainer.nodes_alike import NodesDiffer, differences, facts, fingerprint, join_world


def joined(configs: list[str], overrides: list[list[str]], local_ranks: int) -> str:
    """Return what this rank's join raises, where each node has a configuration."""
    node, os.environ["LOCAL_RANK"] = map(str, divmod(int(os.environ["RANK"]), local_ranks))
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    try:
        join_world(load_config(Path(configs[int(node)]), overrides[int(node)]))
    except NodesDiffer as error:
        return str(error)
    finally:
        stop_process_group()
    return ""


def test_nodes_that_differ_are_refused_by_all_ranks(small_config: Callable[[Path], Path], tmp_path: Path) -> None:
    """Another learning rate on node 1 trained silently; now all four ranks name it. Equal nodes go on."""
    config = str(small_config(tmp_path / "run"))
    assert ranks.call(joined, 4, [config] * 2, [[], []], 2, joined=False) == [""] * 4
    said = ranks.call(joined, 4, [config] * 2, [["optimizer.lr=1e-6"], ["optimizer.lr=2e-6"]], 2, joined=False)
    assert len(set(said)) == 1
    head, line = said[0].splitlines()
    assert head.startswith("the nodes of this run differ")
    assert line.startswith("  key optimizer.lr: 1e-06 on node 0 (") and "; 2e-06 on node 1 (" in line


def test_models_and_data_are_facts(small_config: Callable[[Path], Path], tmp_path: Path) -> None:
    """A file of another content or size, and code; a data file that only node 0 has is no difference."""
    (reference := tmp_path / "config.json").write_text("{}")
    loaded = load_config(small_config(tmp_path / "run"), [f"algorithm.kl.reference={tmp_path}"])
    found = facts(loaded)
    weights = [name for name in found if name.endswith("model.safetensors")]
    data = [name for name in found if name.startswith("data ")]
    assert weights and len(data) == 2 and "code of or1_megatron" in found and "package torch" in found
    assert f"file {reference}" in found
    without = {name: value for name, value in found.items() if name not in data}
    assert differences([found, without], ["a", "b"]) == []
    assert differences([found, {**without, weights[0]: "other"}, found], ["a", "b", "c"]) == [
        f"{weights[0]}: {found[weights[0]]} on a, c; other on b"
    ]
    del without[weights[0]]
    assert differences([found, without], ["a", "b"]) == [f"{weights[0]}: {found[weights[0]]} on a; nothing on b"]


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 20 << 20])
def test_a_fingerprint_tells_files_apart(tmp_path: Path, size: int) -> None:
    """Weights that were trained differ everywhere: here in one of 1,000 bytes. Another length shows too."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(size))
    before = fingerprint(path)
    assert before.startswith(f"{size:,} bytes, digest ") and fingerprint(path) == before
    changed = bytearray(size)
    changed[::1000] = b"\1" * len(changed[::1000])
    path.write_bytes(changed)
    assert (fingerprint(path) != before) == (size > 0)
    path.write_bytes(bytes(size + 1))
    assert fingerprint(path) != before
