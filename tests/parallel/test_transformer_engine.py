"""Transformer Engine's layers as we build them, with a stand-in for it (``te_stand_in``) under Megatron's own wrappers.

Proven: fused norms, fused RoPE, SwiGLU and weight gradients are wired so that results equal transformers', and
checkpoints, exports and handoffs do not depend on the kind of layers. Not proven: anything of the real package's
kernels, bfloat16, its context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from at_layouts import compare_and_export, travel
from safetensors.torch import load_file

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.parallel.mesh import Mesh, build_mesh
from or1_megatron.parallel.network import Network, build_network
from or1_megatron.selftest.checks.layouts import beyond

PARITY: dict[str, tuple[list[str], list[str]]] = {
    "qwen2": (["TP2 SP", "PP2 selective one_pass", "DP2 distopt overlap full"], ["TP2 SP"]),
    "qwen3": (["TP2"], ["TP2"]),
    "qwen3_moe": (["TP2 SP"], ["TP2 SP"]),
    "glm4_moe": (["TP2 SP"], ["TP2 SP"]),
    "deepseek_v3": (["TP2 SP"], ["TP2 SP"]),
    "qwen3_next": (["TP2 SP"], ["TP2 SP"]),
    "gpt_oss": (["TP2 SP"], ["TP2 SP"]),
}
"""Layouts compared, and layouts exported from."""
TRAVEL: list[dict[str, Any]] = [
    {"layers": "own", "tensor": 2},
    {"tensor": 2, "sequence": True},
    {"layers": "own", "pipeline": 2},
    {"pipeline": 2, "distributed_optimizer": False},
]


def call(function: Callable[..., Any], *arguments: Any, joined: bool = True) -> Any:
    """What a function returns on rank 0 of two ranks with the stand-in."""
    return ranks.call(function, 2, *arguments, joined=joined, server="te_rank_server.py")[0]


def built(model: Path, mesh: Mesh, **layout: Any) -> Network:
    return build_network(ModelConfig(hf=model, dtype="float32"), ParallelConfig(ranks=2, tensor=2, **layout), mesh)


def handed_off(model: Path) -> dict[str, Any]:
    """Return whether both kinds of layers hold the same parts of the same HF tensors, and what differs."""
    mesh = build_mesh(ParallelConfig(ranks=2, tensor=2), seed=1)
    own, fused = (built(model, mesh, layers=layers).weights for layers in ("own", "auto"))
    held = [holding for holding in own.holdings() if mesh.rank in holding.ranks]
    return {
        "names": [name for name, _, _ in fused.metadata()],
        "same": own.metadata() == fused.metadata() and own.holdings() == fused.holdings(),
        "held": len(held),
        "differ": [h.name for h in held if not torch.equal(own.read(h.name, h.box), fused.read(h.name, h.box))],
    }


@pytest.mark.parametrize("name", PARITY)
def test_equals_transformers_and_exports_to_the_bit(name: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    compared, exported = PARITY[name]
    case = {"model": tiny(name), "layouts": compared, "export": exported}
    rows = call(compare_and_export, {name: case}, tmp_path, joined=False)[name]
    assert list(rows) == compared
    for layout, row in rows.items():
        assert not list(beyond(row, "float32")), (layout, row)
    source = load_file(tiny(name) / "model.safetensors")
    for layout in exported:
        back = load_file(tmp_path / name / layout.replace(" ", "_") / "model.safetensors")
        assert back.keys() == source.keys()
        assert [key for key, tensor in source.items() if not back[key].equal(tensor)] == []


def test_handoff_is_the_same(tiny: Callable[..., Path]) -> None:
    result = call(handed_off, tiny("qwen2"))
    assert result["same"] and result["differ"] == []
    assert set(result["names"]) == set(load_file(tiny("qwen2") / "model.safetensors"))
    assert result["held"] >= len(result["names"])


def test_a_checkpoint_travels_between_kinds_of_layers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Own layers' checkpoint loads into Transformer Engine's and back: the same tensors under the same names, to the
    bit, moments and norms included, and the updates that follow agree within rounding."""
    travels = call(travel, tiny("qwen2"), "float32", TRAVEL, tmp_path)
    assert len(travels) == len(TRAVEL)
    for stop in travels[1:]:
        assert stop["tensors"] == travels[0]["tensors"] and stop["differ"] == []
        for mine, theirs in zip(stop["updates"], travels[0]["updates"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
