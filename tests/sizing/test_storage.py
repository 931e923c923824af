"""Disk and a node's host memory against figures worked by hand.

Not proven here: what a run on GPUs keeps in host memory; nothing has been measured there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.sizing import storage
from or1_megatron.sizing.memory import routed_bytes
from or1_megatron.sizing.storage import (
    checkpoint_bytes,
    disk_bytes,
    disk_line,
    disk_room,
    disk_short,
    node_memory,
)
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

GIB = 1 << 30
LARGE = Shape.of(read_hf_config(named("shape")["deepseek_r1_distill_qwen_32b"]))
RECIPE = load_config(named("recipe")["or1_32b"], [])


def test_a_32b_on_disk() -> None:
    """A checkpoint: 14 bytes per parameter, about 450 GB. Two newest, the best, and one being written; exports every
    200 of 1,130 steps and at the end; 10 GiB of rollouts."""
    assert checkpoint_bytes(RECIPE, LARGE) == 14 * LARGE.parameters == pytest.approx(459e9, rel=0.01)
    weights = 2 * LARGE.parameters
    assert disk_bytes(RECIPE, LARGE) == {
        "checkpoints": 4 * 14 * LARGE.parameters,
        "exports": (5 + 1) * weights,
        "rollouts": 10 * GIB,
    }


def test_retention_counts() -> None:
    """Without the best, three newest, and those of every 100 steps kept for good: 3 + 1 + 11."""
    kept = ["checkpoint.keep_best=false", "checkpoint.keep_last=3", "checkpoint.keep_every_steps=100"]
    config = load_config(named("recipe")["or1_32b"], kept)
    assert disk_bytes(config, LARGE)["checkpoints"] == 15 * 14 * LARGE.parameters


def test_the_host_of_a_node() -> None:
    """TP 8, DP 16, eight ranks: weights of 2 bytes and 12 / 16 of the optimizer, for an eighth of the model each; twice
    an equal share of a checkpoint; sixteen processes."""
    found = node_memory(RECIPE, LARGE, 8).parts
    assert found["offloaded state"] == pytest.approx(LARGE.parameters * (2 + 12 / 16), rel=1e-4)
    assert found["copies for checkpoints"] == pytest.approx(8 * 2 * 14 * LARGE.parameters / 128, rel=1e-4)
    assert found["processes"] == 16 * 4 * GIB


def test_the_routed_experts_of_a_step() -> None:
    """Worked by hand for Qwen3-235B-A22B: 94 layers * 8 experts of 1 byte are 752 bytes per token. 160 * 32 responses
    of 2,048 + 24,576 tokens at most, the second stage's, are 102.5 GB, held four times; nothing without router replay,
    or of a dense model."""
    config = load_config(named("recipe")["or1_235b"], ["rollout.router_replay=true"])
    shape = Shape.of(read_hf_config(named("shape")["qwen3_235b_a22b"]))
    assert routed_bytes(config, shape) == 160 * 32 * 26_624 * 752 == 102_508_789_760
    assert shape.experts is not None
    assert node_memory(config, shape, 8).parts["routed experts"] == 4 * routed_bytes(config, shape)
    many = replace(shape, experts=replace(shape.experts, count=257))
    assert routed_bytes(config, many) == 2 * routed_bytes(config, shape)
    assert routed_bytes(RECIPE, LARGE) == routed_bytes(load_config(named("recipe")["or1_235b"], []), shape) == 0


def test_room_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert disk_room(tmp_path / "a" / "b") == pytest.approx(disk_room(tmp_path), rel=0.05)


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder holds 40 of the bytes that the run writes; it fits with as many free as are left, and no fewer.
    Both sizes are told."""
    config = RECIPE.model_copy(update={"run": RECIPE.run.model_copy(update={"dir": tmp_path})})
    (config.run.folder / "old").write_bytes(bytes(40))
    needed = sum(disk_bytes(config, LARGE).values())
    for free, fits in ((needed - 40, True), (needed - 41, False)):
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert (disk_short(config, LARGE) == "") == fits
    assert str(config.run.folder) in disk_short(config, LARGE) and "checkpoint.keep_last" in disk_short(config, LARGE)
    assert "has room for" in disk_line(config, LARGE, here=True)
    assert "has room for" not in disk_line(config, LARGE, here=False)
