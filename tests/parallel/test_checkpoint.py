"""Checkpoints: the same layout resumes to the bit, another layout within rounding, damage is named.

Not proven here: asynchronous saving, GPU generators, kills in the middle of a save.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
from checkpoint_worker import STATE

from or1_megatron.parallel.checkpoint import MANIFEST, CheckpointError, check_manifest

TP2 = {"ranks": 2, "tensor": 2}


@dataclass
class Saved:
    folder: Path
    after: Any  # what the uninterrupted run did next


@pytest.fixture(scope="module")
def saved(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    scratch = tmp_path_factory.mktemp("checkpoint")
    folder = scratch / "step_000002"
    out = scratch / "out.json"
    after = ranks.run_json("checkpoint_worker.py", 2, out, str(tiny_qwen2), json.dumps(TP2), "save", str(folder))
    return Saved(folder, after)


def load(saved: Saved, model: Path, layout: dict[str, Any], tmp_path: Path) -> Any:
    arguments = (str(model), json.dumps(layout), "load", str(saved.folder))
    return ranks.run_json("checkpoint_worker.py", layout["ranks"], tmp_path / "out.json", *arguments)


def test_same_layout_resumes_to_the_bit(saved: Saved, tiny_qwen2: Path, tmp_path: Path) -> None:
    """Losses, gradient norms, learning rates and random draws of the resumed run are those of the uninterrupted."""
    resumed = load(saved, tiny_qwen2, TP2, tmp_path)
    assert resumed["state"] == STATE
    assert resumed["updates"] == saved.after["updates"]
    assert resumed["draws"] == saved.after["draws"]


def test_other_layout_resumes(saved: Saved, tiny_qwen2: Path, tmp_path: Path) -> None:
    """PP2 takes up what TP2 saved, optimizer included (its moments decide the second update's loss)."""
    resumed = load(saved, tiny_qwen2, {"ranks": 2, "pipeline": 2}, tmp_path)
    for mine, theirs in zip(resumed["updates"], saved.after["updates"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def damaged(saved: Saved, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(saved.folder, copy)
    check_manifest(copy)
    return copy


def test_flipped_bit_is_named(saved: Saved, tmp_path: Path) -> None:
    copy = damaged(saved, tmp_path)
    file = max(copy.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name} is corrupt"):
        check_manifest(copy)


def test_cut_and_missing_files_are_named(saved: Saved, tmp_path: Path) -> None:
    copy = damaged(saved, tmp_path)
    file = copy / "loop.json"
    file.write_text(file.read_text()[:-1])
    with pytest.raises(CheckpointError, match=r"loop\.json has \d+ bytes; the manifest says"):
        check_manifest(copy)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"loop\.json is missing"):
        check_manifest(copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="not finished"):
        check_manifest(copy)
