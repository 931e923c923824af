"""LoRA against transformers: the same adapters, added to the weights by plain torch, and torch's AdamW in float64.

Not proven here: that peft computes what the oracle does (its formula and names are written out here), Transformer
Engine, bfloat16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from at_layouts import Rank, travel
from safetensors.torch import load_file, save_file

from or1_megatron.config.schema import LoraConfig
from or1_megatron.parallel import check_parity
from or1_megatron.parallel.policy import export_hf
from or1_megatron.parallel.reference import AdaptersOff
from or1_megatron.selftest.checks.layouts import beyond
from or1_megatron.weights.adapter_folder import AdapterFolder
from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.families import ModelError, family_of, read_hf_config
from or1_megatron.weights.files import base_digest

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
    """Return check-parity's rows of each case; their gradients and three steps are those of A and B."""
    store, rank, _ = next(dist.rendezvous("env://"))
    load, rows = check_parity.load_network, {}
    check_parity._by_file_name = dict  # type: ignore[assignment]  # the oracle's names are the files'
    for name, task in cases.items():
        folder = task["model"]["lora"].adapter
        check_parity.load_network = lambda model, folder=folder: Adapted(load(model), folder)  # type: ignore[assignment]
        rows[name] = list(check_parity.measure_on_ranks(task, name, store, rank))
    return rows


def task(model: Path, adapter: Path, targets: list[str], layouts: list[str]) -> dict[str, Any]:
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets, "adapter": adapter}
    fields = {"hf": model, "dtype": "float32", "lora": LoraConfig(**lora)}
    return {"model": fields, "layouts": layouts, "sequences": 8, "longest": 40, "seed": 1}


@pytest.fixture(scope="module")
def adapters(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The model's folder and the adapters' of each case."""
    scratch = tmp_path_factory.mktemp("lora")
    models = {case: tiny(name, **changes) for case, (name, changes, _, _) in CASES.items()}
    return {case: (model, make_adapters(scratch / case, model, CASES[case][2])) for case, model in models.items()}


@pytest.fixture(scope="module")
def measured(adapters: dict[str, tuple[Path, Path]]) -> dict[str, list[dict[str, Any]]]:
    tasks = {case: task(*folders, *CASES[case][2:]) for case, folders in adapters.items()}
    rows: dict[str, list[dict[str, Any]]] = ranks.call(compare, 2, tasks, joined=False)[0]
    return rows


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Log-probs, entropies, gradients of A and B, and A and B after three AdamW steps."""
    assert [row["name"] for row in measured[case]] == CASES[case][3]
    for row in measured[case]:
        assert not list(beyond(row, "float32", 1.0)), row


def use(model: Path, adapter: Path, targets: list[str], layout: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Return, of a policy with these adapters, scores with and without them, what it trains, and what was misread."""
    rank = Rank(model, "float32", layout, {"rank": RANK, "alpha": ALPHA, "targets": targets, "adapter": adapter})
    policy, rows = rank.policy, rank.rows()
    scores = [policy.score(rows, 1.0), AdaptersOff(policy).score(rows, 1.0), policy.score(rows, 1.0)]
    export_hf(policy, scratch / "hf")
    dist.barrier()
    merged = load_file(scratch / "hf/model.safetensors")
    misread = [
        holding.name
        for holding in policy.weights.holdings()
        if rank.mesh.rank in holding.ranks
        and not torch.allclose(
            policy.weights.read(holding.name, holding.box),
            merged[holding.name][tuple(slice(*ends) for ends in holding.box)],
            rtol=0,
            atol=1e-6,
        )
    ]
    trained = sum(p.numel() for p in policy.networks[0].parameters() if p.requires_grad)
    buffers = sum(buffer.grad_data.numel() for chunk in policy.chunks for buffer in chunk.buffers)
    plain = Rank(model, "float32", layout).policy.score(rows, 1.0)
    return {"scores": scores, "plain": plain, "misread": misread, "counts": (trained, buffers)}


def use_and_travel(cases: dict[str, Any], scratch: Path) -> dict[str, Any]:
    used = {case: use(*of, scratch / case) for case, (of, _) in cases.items()}
    moves = {}
    for case, ((model, _, targets, _), to) in cases.items():
        lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
        moves[case] = travel(model, "bfloat16", to, scratch / f"{case} moves", lora)
    return {"used": used, "moves": moves}


def test_what_leaves_a_policy(adapters: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Reads and exports are W + alpha / r * B A; the folder of adapters has the bytes that it was loaded from; adapters
    switched off leave the model's own scores, to the bit; any layout loads any other's checkpoint, which holds A and B,
    their masters and moments alone."""
    plan: dict[str, tuple[Any, list[Any]]] = {
        "dense": ({"tensor": 2, "sequence": True}, [{"tensor": 2}, {"pipeline": 2}, {"distributed_optimizer": False}]),
        "q and v": ({"pipeline": 2}, [{}, {"tensor": 2}]),
        "experts": ({"expert": 2}, [{"expert": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}]),
    }
    cases = {case: ((*adapters[case], CASES[case][2], layout), to) for case, (layout, to) in plan.items()}
    for case in plan:
        (tmp_path / case).mkdir()
    everyone = ranks.call(use_and_travel, 2, cases, tmp_path)
    for case, (model, folder) in adapters.items():
        used = everyone[0]["used"][case]
        with_adapters, off, on_again, plain = ([x.tolist() for x in flat(s)] for s in (*used["scores"], used["plain"]))
        assert off == plain and with_adapters == on_again != off
        assert [of_rank["used"][case]["misread"] for of_rank in everyone] == [[], []]
        for of_rank in everyone:
            trained, buffers = of_rank["used"][case]["counts"]
            assert 0 < trained and buffers < 1.2 * trained
        start, merged = (load_file(f / "model.safetensors") for f in (model, tmp_path / case / "hf"))
        own = load_file(folder / "adapter_model.safetensors")
        for name, weight in start.items():
            a, b = (own.get(f"base_model.model.{name.removesuffix('weight')}{x}.weight") for x in ("lora_A", "lora_B"))
            expected = weight if a is None or b is None else weight.double() + ALPHA / RANK * b.double() @ a.double()
            assert torch.allclose(merged[name].double(), expected.double(), rtol=0, atol=1e-6), name
        again = load_file(tmp_path / case / "hf/adapter/adapter_model.safetensors")
        assert again.keys() == own.keys() and all(tensor.equal(own[name]) for name, tensor in again.items())
        first, *later = everyone[0]["moves"][case]
        bare = sorted(name.removeprefix("base_model.model.") for name in all_names(model, CASES[case][2]))
        kinds = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.param.")
        assert first["tensors"] == sorted(kind + name for kind in kinds for name in bare)
        for stop in later:
            assert stop["tensors"] == first["tensors"] and stop["differ"] == []
            for mine, theirs in zip(stop["updates"], first["updates"], strict=True):
                assert mine == pytest.approx(theirs, rel=2e-2)


def flat(scores: Any) -> list[Any]:
    return [values for replica in scores for row in replica for values in row]


def all_names(model: Path, targets: list[str]) -> list[str]:
    return [f"{name}.{factor}.weight" for name in linears(model, targets) for factor in ("lora_A", "lora_B")]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 4}, "says r = 4; expected 3"),
        ({"names": {}}, "it lacks model.layers.0.mlp.down_proj.lora_A.weight, "),
        ({"digest": "0"}, "its adapters are of another base than "),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    changed: dict[str, Any], said: str, adapters: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    model, folder = adapters["dense"]
    shutil.copytree(folder, tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"r": changed.get("r", RANK)}
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(config))
    tensors = changed.get("names", load_file(folder / "adapter_model.safetensors"))
    save_file(
        tensors,
        tmp_path / "a/adapter_model.safetensors",
        metadata={"base_digest": changed.get("digest", base_digest(model))},
    )
    hf = read_hf_config(model)
    with pytest.raises(ModelError, match=said):
        AdapterFolder(tmp_path / "a", model, hf, AdapterTable(family_of(hf), hf, RANK, ()), ALPHA)


def test_a_target_that_names_nothing_is_refused(tiny_qwen2: Path) -> None:
    hf = read_hf_config(tiny_qwen2)
    with pytest.raises(ModelError, match="ends in qproj, norm; did you mean q_proj"):
        AdapterTable(family_of(hf), hf, RANK, ("qproj", "norm", "mlp.up_proj"))
