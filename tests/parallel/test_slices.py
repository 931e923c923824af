"""A real policy's shards by slices, against the HF folder that it was loaded from. Sending them is not tried here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem
import ranks
import torch
from safetensors.torch import load_file

LAYOUT = {"ranks": 4, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2}


def read_slices(model: Path) -> tuple[list[Any], int, str]:
    """Return what this rank reads, and rank 0 gathers, that is not in the HF folder, and how many numbers it reads."""
    policy = problem.make_policy(model, **LAYOUT)
    weights, rank = policy.weights, policy.mesh.rank
    tensors = load_file(model / "model.safetensors")
    wrong, numbers = [], 0
    for holding in weights.holdings():
        if rank in holding.ranks:
            expected = tensors[holding.name][tuple(slice(*bounds) for bounds in holding.box)]
            if not torch.equal(weights.read(holding.name, holding.box), expected):
                wrong.append((holding.name, holding.box))
            numbers += expected.numel()
    gathered = list(weights)
    if rank == 0:
        wrong += [(name, "gathered") for name, tensor in gathered if not torch.equal(tensor, tensors[name])]
    if [name for name, _ in gathered] != [name for name, _, _ in weights.metadata()]:
        wrong.append(("gathered", "order"))
    return wrong, numbers, weights.from_rank_0("of rank 0" if rank == 0 else None)


def test_every_rank_reads_what_it_is_said_to_hold(tiny_qwen2: Path) -> None:
    """TP2, PP2 with two chunks per stage; a vocabulary that two ranks cannot share evenly, two key/value heads."""
    everyone = ranks.call(read_slices, 4, tiny_qwen2)
    assert [wrong for wrong, *_ in everyone] == [[]] * 4
    assert {value for *_, value in everyone} == {"of rank 0"}
    tensors = load_file(tiny_qwen2 / "model.safetensors")
    twice = sum(t.numel() for name, t in tensors.items() if "norm" in name)  # TP does not cut norms
    assert sum(numbers for _, numbers, _ in everyone) == sum(t.numel() for t in tensors.values()) + twice


def test_grouped_experts_go_by_the_names_of_single_ones() -> None:
    """Megatron's two ways to hold experts. By name alone: the grouped one needs Transformer Engine and is not run."""
    from or1_megatron.parallel.weights import named_in_model

    names = {
        named_in_model(f"decoder.layers.1.mlp.experts.{name}", range(8, 12), 4)
        for name in ("linear_fc1.weight3", "local_experts.3.linear_fc1.weight")
    }
    assert names == {"decoder.layers.9.mlp.experts.local_experts.7.linear_fc1.weight"}
    dense = "decoder.layers.1.mlp.linear_fc1.weight"
    assert named_in_model(dense, range(8, 12), 4) == "decoder.layers.9.mlp.linear_fc1.weight"
