"""Transformer Engine's layers as we build them, with a stand-in for it (``te_stand_in``) under Megatron's own wrappers.

Proven: which modules, arguments, names and shapes we use, that fused norms, fused RoPE, SwiGLU and weight gradients are
wired so that results equal transformers', and that checkpoints, exports and handoffs do not depend on the kind of
layers. Not proven: anything of the real package's kernels, bfloat16, its context parallelism, that communication
overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from safetensors.torch import load_file

PARITY: dict[str, tuple[list[str], list[str]]] = {
    "qwen2": (["TP2 SP", "PP2 selective one_pass", "DP2 distopt overlap_gather full"], ["TP2 SP"]),
    "qwen3": (["TP2"], ["TP2"]),
    "qwen3_moe": (["TP2 SP"], ["TP2 SP"]),
}
"""Layouts compared, and layouts exported from."""
TRAVEL: list[dict[str, Any]] = [
    {"layers": "own", "tensor": 2},
    {"tensor": 2, "sequence": True},
    {"layers": "own", "pipeline": 2},
    {"pipeline": 2, "distributed_optimizer": False},
]


@pytest.fixture(scope="module")
def found(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("transformer_engine")
    plan = {
        "parity": [(name, str(tiny(name)), compared, exported) for name, (compared, exported) in PARITY.items()],
        "handoff": str(tiny("qwen2")),
        "travel": TRAVEL,
    }
    return folder, ranks.run_json(
        "te_worker.py", 2, folder / "out.json", json.dumps(plan), str(folder), server="te_rank_server.py"
    )


@pytest.mark.parametrize("name", PARITY)
def test_equals_transformers_and_exports_to_the_bit(
    name: str, found: tuple[Path, dict[str, Any]], tiny: Callable[..., Path]
) -> None:
    folder, told = found
    compared, exported = PARITY[name]
    assert list(told["parity"][name]) == compared
    for layout, row in told["parity"][name].items():
        difference = row["difference"]
        assert max(difference["log_prob"], difference["entropy"], difference["loss"]) <= 1e-5, (layout, row)
        assert max(difference["grad_norm"], difference["gradient"], difference["parameters"]) <= 1e-4, (layout, row)
    source = load_file(tiny(name) / "model.safetensors")
    for layout in exported:
        back = load_file(folder / name / layout.replace(" ", "_") / "model.safetensors")
        assert back.keys() == source.keys()
        assert [key for key, tensor in source.items() if not back[key].equal(tensor)] == []


def test_what_a_layer_is_made_of(found: tuple[Path, dict[str, Any]]) -> None:
    """Both norms lie in the linears after them. All weight gradients go straight to main_grad. The linears after a norm
    are asked for three overlaps: of the gather of their inputs, and in the backward pass of both collectives."""
    told = found[1]["switches"]
    assert told["parameters"] == {
        "self_attention.linear_qkv.layer_norm_weight": [64],
        "self_attention.linear_qkv.weight": [64, 64],  # (4 query + 2 * 2 key/value heads) * 16 / TP 2
        "self_attention.linear_qkv.bias": [64],
        "self_attention.linear_proj.weight": [64, 32],
        "mlp.linear_fc1.layer_norm_weight": [64],
        "mlp.linear_fc1.weight": [96, 64],  # gate and up of 96 / TP 2
        "mlp.linear_fc2.weight": [64, 48],
    }
    norms = ["mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight"]
    assert told["norms summed over TP"] == norms
    assert told["cut"] == sorted(set(told["parameters"]) - set(norms))
    extra = {name for name in told["state"] if name.endswith("_extra_state")}
    assert set(told["state"]) - extra == set(told["parameters"])
    after_norm = ["ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag"]
    into_sum = ["ub_overlap_ag", "ub_overlap_rs"]
    assert told["overlaps"] == {"qkv": after_norm, "proj": into_sum, "fc1": after_norm, "fc2": into_sum}
    assert told["buffers"] == {name: name for name in ("qkv", "proj", "fc1", "fc2")}
    assert all(told["fused"].values())


def test_handoff_is_the_same(found: tuple[Path, dict[str, Any]], tiny: Callable[..., Path]) -> None:
    told = found[1]["handoff"]
    assert told["same"] and told["differ"] == []
    assert set(told["names"]) == set(load_file(tiny("qwen2") / "model.safetensors"))
    assert told["held"] >= len(told["names"])


def test_a_checkpoint_travels_between_kinds_of_layers(found: tuple[Path, dict[str, Any]]) -> None:
    """Own layers' checkpoint loads into Transformer Engine's and back: the same tensors under the same names, to the
    bit, moments and norms included, and the updates that follow agree within rounding."""
    travels = found[1]["travel"]
    assert len(travels) == len(TRAVEL)
    for stop in travels[1:]:
        assert stop["tensors"] == travels[0]["tensors"] and stop["differ"] == []
        for mine, theirs in zip(stop["updates"], travels[0]["updates"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
