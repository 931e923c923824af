"""LoRA against transformers: the same adapters, added to the weights by plain torch, and torch's AdamW in float64.

Not proven here: that peft computes what the oracle does (its formula and names are written out here), Transformer
Engine, bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from or1_megatron.parallel import check_parity
from or1_megatron.selftest.checks.layouts import beyond
from or1_megatron.weights.families import family_of, read_hf_config

RANK, ALPHA = 3, 5.0
CASES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "dense": ("qwen2", {}, [], ["1", "TP2", "PP2", "TP2 SP", "CP2", "full", "TP2 distopt"]),
    "q and v": ("qwen3", {"tie_word_embeddings": True}, ["q_proj", "v_proj", "up_proj"], ["1", "TP2", "PP2"]),
    "experts": ("qwen3_moe", {}, [], ["1", "TP2 SP", "DP2 EP2", "PP2"]),
}
"""Model, changes of its config, targets (none: all), layouts."""


def linears(model: Path, targets: list[str]) -> dict[str, tuple[int, int]]:
    """Return [out, in] of the linears with adapters, by name: by the files' names, without the table of adapters."""
    shapes = {
        name.removesuffix(".weight"): tensor.shape for name, tensor in load_file(model / "model.safetensors").items()
    }
    kinds = targets or [f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")]
    return {name: tuple(shape) for name, shape in shapes.items() if name.rpartition(".")[2] in kinds}


def make_adapters(folder: Path, model: Path, targets: list[str]) -> Path:
    """Write a folder as peft does, with B away from zero."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, (out, width) in linears(model, targets).items():
        for factor, shape in (("lora_A", (RANK, width)), ("lora_B", (out, RANK))):
            tensors[f"base_model.model.{name}.{factor}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets or ["all"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Adapted:
    """A network of transformers whose weights are W + alpha / r * B A, and whose parameters are the A and B."""

    def __init__(self, network: Any, folder: Path) -> None:
        self._network, self.config, self.device = network, network.config, network.device
        stored = load_file(folder / "adapter_model.safetensors").items()
        self._own = {name.removeprefix("base_model.model."): tensor.requires_grad_() for name, tensor in stored}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._own.items()

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from self._own.values()

    def to(self, dtype: torch.dtype) -> None:
        self._network.to(dtype)
        self._own = {name: p.detach().to(dtype).requires_grad_() for name, p in self._own.items()}

    def _change(self, name: str) -> torch.Tensor | None:
        a, b = (self._own.get(f"{name}.{factor}.weight") for factor in ("lora_A", "lora_B"))
        return None if a is None or b is None else ALPHA / RANK * b @ a

    def _changed(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        prefix, joined, last = name.partition(".experts.")
        if not joined:
            change = self._change(name.removesuffix(".weight"))
            return weight if change is None else weight + change
        kinds = ("gate", "up") if last == "gate_up_proj" else ("down",)
        change = [
            torch.cat([self._change(f"{prefix}.experts.{expert}.{kind}_proj") for kind in kinds])  # type: ignore[misc]
            for expert in range(len(weight))
        ]
        return weight + torch.stack(change)

    def __call__(self, ids: torch.Tensor) -> Any:
        weights = {name: self._changed(name, p.detach()) for name, p in self._network.named_parameters()}
        return torch.func.functional_call(self._network, weights, (ids,))


def compare(cases: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    store, rank, _ = next(dist.rendezvous("env://"))
    load, rows = check_parity.load_network, {}
    check_parity._by_file_name = dict  # type: ignore[assignment]  # the oracle's names are the files'
    for name, task in cases.items():
        folder = Path(task["model"]["lora"]["adapter"])
        check_parity.load_network = lambda model, folder=folder: Adapted(load(model), folder)  # type: ignore[assignment]
        rows[name] = list(check_parity.measure_on_ranks(task, name, store, rank))
    return rows


@pytest.fixture(scope="module")
def measured(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows of check-parity, whose numbers of the three steps and gradients are those of A and B."""
    scratch, tasks = tmp_path_factory.mktemp("lora"), {}
    for case, (name, changes, targets, layouts) in CASES.items():
        model = tiny(name, **changes)
        adapter = make_adapters(scratch / case, model, targets)
        lora = {"rank": RANK, "alpha": ALPHA, "targets": tuple(targets), "adapter": adapter}
        task = {"model": {"hf": model, "dtype": "float32", "lora": lora}, "layouts": layouts}
        tasks[case] = {**task, "sequences": 8, "longest": 40, "seed": 1}
    rows: dict[str, list[dict[str, Any]]] = ranks.call(compare, 2, tasks, joined=False)[0]
    return rows


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Log-probs, entropies, gradients of A and B, and A and B after three AdamW steps."""
    assert [row["name"] for row in measured[case]] == CASES[case][3]
    for row in measured[case]:
        assert not list(beyond(row, "float32", 1.0)), row
