"""A real policy's shards by slices, against the HF folder that it was loaded from. Sending them is not tried here."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_json
from safetensors.torch import load_file


def test_every_rank_reads_what_it_is_said_to_hold(tiny_qwen2: Path, tmp_path: Path) -> None:
    """TP2, PP2 with two chunks per stage; a vocabulary that two ranks cannot share evenly, two key/value heads."""
    layout = {"ranks": 4, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2}
    everyone = run_json("slices_worker.py", 4, tmp_path / "out.json", str(tiny_qwen2), json.dumps(layout))
    assert [wrong for wrong, *_ in everyone] == [[]] * 4
    assert {value for *_, value in everyone} == {"of rank 0"}
    tensors = load_file(tiny_qwen2 / "model.safetensors")
    twice = sum(t.numel() for name, t in tensors.items() if "norm" in name)  # TP does not cut norms
    assert sum(read for _, read, _ in everyone) == sum(t.numel() for t in tensors.values()) + twice


def test_grouped_experts_go_by_the_names_of_single_ones() -> None:
    """Megatron's two ways to hold experts. By name alone: the grouped one needs Transformer Engine and is not run."""
    from or1_megatron.parallel.weights import named_in_model

    found = {
        named_in_model(f"decoder.layers.1.mlp.experts.{name}", range(8, 12), 4)
        for name in ("linear_fc1.weight3", "local_experts.3.linear_fc1.weight")
    }
    assert found == {"decoder.layers.9.mlp.experts.local_experts.7.linear_fc1.weight"}
    dense = "decoder.layers.1.mlp.linear_fc1.weight"
    assert named_in_model(dense, range(8, 12), 4) == "decoder.layers.9.mlp.linear_fc1.weight"
