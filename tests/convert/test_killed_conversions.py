"""Conversions that are killed at any moment resume with the same command, with the result of an uninterrupted one.

Not proven here: that a disk keeps what was synced when the power fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ranks
import torch
from rich.console import Console
from safetensors.torch import load_file

from or1_megatron.convert.to_hf import megatron_to_hf

KILLS = 8


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_killed_at_random_operations(make_model: Any, tmp_path: Path) -> None:
    """The checkpoint's files are those of an uninterrupted conversion, the HF folder's tensors those of the source;
    several lives resumed with files of earlier ones, and nothing is left beside the two."""
    hf, scratch = make_model(tmp_path / "hf", "Qwen2ForCausalLM"), tmp_path / "scratch"
    scratch.mkdir()
    worker, out = str(Path(__file__).with_name("killed_conversions.py")), tmp_path / "out.json"
    told = ranks.run_json(worker, 1, out, str(hf), str(scratch), str(KILLS), "5")
    logs = ["back.log", "back.resumed", "megatron.log", "megatron.resumed"]
    assert told["left"] == sorted(["back", "first", "megatron", *logs])
    for direction in ("there", "back"):
        assert told[direction]["kills"] == KILLS and told[direction]["resumed"] > 0
    names = sorted(path.name for path in (scratch / "first").iterdir())
    assert names == sorted(path.name for path in (scratch / "megatron").iterdir()) and len(names) > 10
    for name in names:
        if name.endswith(".distcp"):
            assert (scratch / "first" / name).read_bytes() == (scratch / "megatron" / name).read_bytes(), name
    megatron_to_hf(scratch / "megatron", tmp_path / "again", Console(quiet=True))
    source = tensors(hf)
    for folder in (scratch / "back", tmp_path / "again"):
        back = tensors(folder)
        assert source.keys() == back.keys() and all(torch.equal(source[name], back[name]) for name in source)
