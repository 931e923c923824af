"""Every family in Megatron against transformers, and loaded and exported again to the bit.

One start of two ranks does all of the fast part. Qwen2 has test_parity to itself. Not proven here: sizes beyond a few
layers, Transformer Engine, NCCL, bfloat16 of these families.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from at_layouts import compare_and_export
from safetensors.torch import load_file

from or1_megatron.selftest.checks.layouts import beyond

FAST: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "qwen3": ("qwen3", {}, ["TP2 SP"], ["TP2"]),
    "llama3": ("llama3", {}, ["TP2"], ["PP2"]),
    "mistral": ("mistral", {}, ["CP2"], ["TP2"]),
    "one_kv_head": ("one_kv_head", {}, ["TP2"], ["TP2"]),
    "qwen3_moe": ("qwen3_moe", {}, ["TP2 SP", "DP2 EP2"], ["TP2 SP", "DP2 EP2"]),
    "glm4_moe": ("glm4_moe", {}, ["TP2 SP", "DP2 EP2"], ["TP2 SP", "PP2"]),
    "deepseek_v3": ("deepseek_v3", {}, ["TP2 SP", "CP2"], ["TP2 SP", "PP2"]),
    "qwen3_next": ("qwen3_next", {}, ["TP2 SP", "CP2 EP2"], ["TP2 SP", "DP2 EP2"]),
    "qwen3_5": ("qwen3_5", {}, ["TP2"], ["TP2"]),
    "gpt_oss": ("gpt_oss", {}, ["1", "TP2 SP", "CP2 EP2", "PP2"], ["TP2 SP", "DP2 EP2"]),
}
"""Model, changes of its config, layouts compared, layouts exported from."""
MIXTURE = ["1", "PP2", "CP2 EP2", "TP2 SP DP2 EP2 distopt", "PP2 DP2 EP2", "full", "selective"]
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
SLOW: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "qwen3": ("qwen3", {}, ["1", "PP2", "CP2", "TP2 PP2 SP distopt", "PP2 VPP2 one_pass"], ["PP2 VPP2"]),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}, ["PP2"], ["PP2"]),
    "llama3 tied": ("llama3", {"tie_word_embeddings": True}, ["1", "TP2 PP2", "CP2", "full"], ["TP2 PP2"]),
    "mistral": ("mistral", {}, ["1", "TP2 PP2", "TP2 SP distopt"], ["PP2"]),
    "one_kv_head": ("one_kv_head", {}, ["1", "CP2", "TP4", "TP4 SP", "TP2 SP", "TP2 CP2 distopt"], ["TP4"]),
    "two_kv_heads": ("qwen2", {}, ["TP4", "TP4 SP distopt"], ["TP4"]),
    "qwen3_moe": (
        "qwen3_moe",
        {"norm_topk_prob": False},
        [
            "1",
            "PP2",
            "CP2",
            "CP2 EP2",
            "DP2 EP2 distopt",
            "TP2 SP DP2 EP2",
            "PP2 DP2 EP2",
            "DP4 EP2",
            "full",
            "selective",
        ],
        ["TP2 SP DP2 EP2", "PP2 DP2 EP2"],
    ),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}, MIXTURE, ["TP2 SP DP2 EP2"]),
    "deepseek_v3": ("deepseek_v3", MOONLIGHT, MIXTURE, ["TP2 SP DP2 EP2"]),
    "qwen3_next": ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": []}, MIXTURE, ["PP2 DP2 EP2"]),
    "qwen3_5": ("qwen3_5", {"tie_word_embeddings": True}, ["1", "CP2", "TP4 distopt", "PP2 VPP2"], ["TP4", "PP2 VPP2"]),
    "gpt_oss": ("gpt_oss", {"num_key_value_heads": 1}, [*MIXTURE, "PP2 VPP2"], ["TP2 SP DP2 EP2", "PP2 VPP2"]),
    "qwen3_5_moe": ("qwen3_5_moe", {}, ["TP2 SP CP2 EP2 distopt"], ["TP2 SP DP2 EP2"]),
}


def measure(
    tiny: Callable[..., Path],
    folder: Path,
    plan: dict[str, tuple[str, dict[str, Any], list[str], list[str]]],
    size: int,
) -> dict[str, tuple[Path, Path, dict[str, Any]]]:
    """Return for each case the model's folder, that of its exports, and check-parity's rows by layout."""
    models = {case: tiny(name, **changes) for case, (name, changes, _, _) in plan.items()}
    task = {
        case: {"model": models[case], "layouts": compared, "export": exported}
        for case, (_, _, compared, exported) in plan.items()
    }
    rows = ranks.call(compare_and_export, size, task, folder, joined=False)[0]
    return {case: (models[case], folder / case, rows[case]) for case in plan}


def check(case: tuple[Path, Path, dict[str, Any]], compared: list[str], exported: list[str]) -> None:
    model, exports, rows = case
    assert list(rows) == compared
    for layout, row in rows.items():
        assert not list(beyond(row, "float32")), (layout, row)
    source = load_file(model / "model.safetensors")
    for layout in exported:
        folder = exports / layout.replace(" ", "_")
        back = load_file(folder / "model.safetensors")
        assert back.keys() == source.keys()
        for name, tensor in source.items():
            assert back[name].dtype == tensor.dtype
            assert back[name].equal(tensor), f"{layout}: {name}"
        assert json.loads((folder / "config.json").read_text()) == json.loads((model / "config.json").read_text())


@pytest.fixture(scope="module")
def measured(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(tiny, tmp_path_factory.mktemp("families"), FAST, 2)


@pytest.mark.parametrize("case", FAST)
def test_equals_transformers_and_exports_to_the_bit(case: str, measured: dict[str, Any]) -> None:
    check(measured[case], *FAST[case][2:])


@pytest.mark.slow
def test_more_layouts_of_every_family(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = measure(tiny, tmp_path, SLOW, 4)
    for case, (_, _, compared, exported) in SLOW.items():
        check(result[case], compared, exported)
