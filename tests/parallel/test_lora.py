"""LoRA against transformers: the same adapters, added to the weights by plain torch, and torch's AdamW in float64.

Not proven here: that peft agrees (its names and formula are written out below), Transformer Engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from at_layouts import Rank, travel
from safetensors.torch import load_file, save_file

from or1_megatron.config.schema import LoraConfig
from or1_megatron.parallel import parity
from or1_megatron.parallel.mesh import start_process_group
from or1_megatron.parallel.policy import export_hf
from or1_megatron.selftest.checks.layouts import beyond
from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.families import ModelError, family_of, read_hf_config
from or1_megatron.weights.stacked_experts import split

RANK, ALPHA = 3, 5.0
LINEARS = [f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")]
LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
NET = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
SEQUENCE = {"tensor": 2, "sequence": True}
EXPERTS = {"expert": 2}
CASES: dict[str, tuple[str, list[str], list[str], list[dict[str, Any]]]] = {
    "dense": ("qwen2", LINEARS, ["PP2", "CP2", "full"], [SEQUENCE, {"pipeline": 2}]),
    "some": ("one_kv_head", ["q_proj", "v_proj", "up_proj"], ["TP2"], [{"tensor": 2}]),
    "experts": ("qwen3_moe", LINEARS, ["TP2 SP", "DP2 EP2"], [EXPERTS, SEQUENCE]),
    "only experts": ("qwen3_moe", ["gate_proj"], ["PP2"], [{"pipeline": 2}, EXPERTS]),  # on the second stage
    "latents": ("deepseek_v3", [*LATENTS, *LINEARS[3:]], ["TP2 SP"], [SEQUENCE, {"pipeline": 2}]),
    "gpt_oss": ("gpt_oss", LINEARS[:4], ["TP2 SP"], [SEQUENCE]),
    "delta net": ("qwen3_5", [*LINEARS, *NET], ["TP2 SP"], [SEQUENCE, {"context": 2}]),
}
"""Model, targets, layouts compared, layouts that load each other's checkpoints."""
MOVED_AS = {"delta net": "float32"}  # in bf16 the rounding of delta nets shows


def make_adapters(folder: Path, model: Path, targets: list[str]) -> LoraConfig:
    """Write a folder as peft does, with B away from zero."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] in targets and weight.dim() == 2:
            for factor, shape in (("lora_A", (RANK, weight.shape[1])), ("lora_B", (weight.shape[0], RANK))):
                key = f"base_model.model.{name.removesuffix('weight')}{factor}.weight"
                tensors[key] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    return LoraConfig(rank=RANK, alpha=ALPHA, targets=tuple(targets), adapter=folder)


class Adapted:
    """A network of transformers whose weights are W + alpha / r * B A, and whose parameters are the A and B."""

    def __init__(self, network: Any, folder: Path) -> None:
        self._network, self.config, self.device = network, network.config, network.device
        stored = load_file(folder / "adapter_model.safetensors").items()
        self.own = {name.removeprefix("base_model.model."): tensor.requires_grad_() for name, tensor in stored}
        self.named_parameters = self.own.items

    def parameters(self) -> Iterator[torch.Tensor]:
        yield from self.own.values()

    def to(self, dtype: torch.dtype) -> None:
        self._network.to(dtype)
        self.own.update({name: p.detach().to(dtype).requires_grad_() for name, p in self.own.items()})

    def changed(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        prefix, joined, last = name.partition(".experts.")
        if joined and "." not in last:  # in memory [experts, out, in], gate above up
            kinds = ("gate", "up") if last == "gate_up_proj" else ("down",)
            files = [[f"{prefix}.experts.{e}.{kind}_proj.weight" for kind in kinds] for e in range(len(weight))]
            return torch.stack(
                [torch.cat(list(map(self.changed, f, w.chunk(len(f))))) for f, w in zip(files, weight, strict=True)]
            )
        a, b = (self.own.get(f"{name.removesuffix('weight')}{x}.weight") for x in ("lora_A", "lora_B"))
        return weight if a is None or b is None else weight + ALPHA / RANK * b @ a

    def __call__(self, ids: torch.Tensor) -> Any:
        weights = {name: self.changed(name, p.detach()) for name, p in self._network.named_parameters()}
        return torch.func.functional_call(self._network, weights, (ids,))


def use(cases: dict[str, tuple[Path, LoraConfig]], scratch: Path) -> dict[str, Any]:
    """Return of each case check-parity's rows, whose gradients and steps are those of A and B, the policy's scores with
    adapters, without them and of the bare model, what the handoff would misread, and the travels of a checkpoint."""
    store, rank, _ = next(dist.rendezvous("env://"))
    load = parity.load_network
    parity.by_file_name = lambda _, tensors: dict(tensors)  # the oracle has the files' names
    parity.cast = Adapted.to  # type: ignore[assignment]  # of the base model, too
    results: dict[str, Any] = {}
    for case, (model, lora) in cases.items():
        assert lora.adapter is not None
        parity.load_network = lambda of, to=lora.adapter: Adapted(load(of), to)  # type: ignore[assignment]
        task = {"model": {"hf": model, "dtype": "float32", "lora": lora}, "layouts": CASES[case][2]}
        task |= {"sequences": 8, "longest": 40, "seed": 1}
        results[case] = {"parity": list(parity.measure_on_ranks(task, case, store, rank))}
    start_process_group(60)
    for case, (model, lora) in cases.items():
        layouts = CASES[case][3]
        at = Rank(model, "float32", layouts[0], lora.model_dump())
        scores = [score(at.rows(), 1.0) for score in (at.policy.score, at.policy.score_base, at.policy.score)]
        export_hf(at.policy, scratch / case)
        dist.barrier()
        merged, read = split(load_file(scratch / case / "model.safetensors")), at.policy.weights.read
        boxes = [(h.name, h.box) for h in at.policy.weights.holdings() if rank in h.ranks]
        misread = [n for n, box in boxes if not close(read(n, box), merged[n][tuple(slice(*ends) for ends in box)])]
        fresh = {**lora.model_dump(), "adapter": None}
        plain = Rank(model, "float32", layouts[0]).policy.score(at.rows(), 1.0)
        moves = travel(model, MOVED_AS.get(case, "bfloat16"), layouts, scratch / f"{case} moves", fresh)
        results[case] |= {"scores": [*scores, plain], "misread": misread, "moves": moves}
    return results


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def cases(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, LoraConfig]]:
    models, scratch = {case: tiny(name) for case, (name, *_) in CASES.items()}, tmp_path_factory.mktemp("adapters")
    return {case: (model, make_adapters(scratch / case, model, CASES[case][1])) for case, model in models.items()}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def everyone(cases: dict[str, tuple[Path, LoraConfig]], exports: Path) -> list[dict[str, Any]]:
    return ranks.call(use, 2, cases, exports, joined=False)


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, everyone: list[dict[str, Any]]) -> None:
    """Log-probs, entropies, gradients of A and B, and A and B after three AdamW steps."""
    rows = everyone[0][case]["parity"]
    assert [row["name"] for row in rows] == CASES[case][2]
    assert [line for row in rows for line in beyond(row, "float32")] == []


@pytest.mark.parametrize("case", CASES)
def test_what_leaves_a_policy(
    case: str, cases: dict[str, tuple[Path, LoraConfig]], everyone: list[dict[str, Any]], exports: Path
) -> None:
    """Reads and export are W + alpha / r * B A. Scores without adapters are the bare model's. The folder of
    adapters has the bytes that were loaded. A checkpoint holds A, B, masters and moments alone, for any layout."""
    model, lora = cases[case]
    assert lora.adapter is not None
    here = everyone[0][case]
    (with_adapters, off, again, plain) = ([x.tolist() for d in s for row in d for x in row] for s in here["scores"])
    assert with_adapters == again != off
    for mine, bare in zip(off, plain, strict=True):
        assert mine == pytest.approx(bare, rel=0, abs=1e-5)
    assert [rank[case]["misread"] for rank in everyone] == [[], []]
    oracle = Adapted(SimpleNamespace(config=None, device=None), lora.adapter)
    merged, start = (load_file(folder / "model.safetensors") for folder in (exports / case, model))
    with torch.no_grad():
        assert [name for name, weight in start.items() if not close(oracle.changed(name, weight), merged[name])] == []
    own, exported = (load_file(f / "adapter_model.safetensors") for f in (lora.adapter, exports / case / "adapter"))
    assert exported.keys() == own.keys() and all(tensor.equal(own[name]) for name, tensor in exported.items())
    masters = () if case in MOVED_AS else ("param",)
    kinds = ("", *(f"optimizer.state.{kind}." for kind in ("exp_avg", "exp_avg_sq", *masters)))
    assert here["moves"][0]["tensors"] == sorted(kind + name for kind in kinds for name in oracle.own)
    assert [stop["differ"] for stop in here["moves"]] == [[]] * len(CASES[case][3])
    for stop in here["moves"][1:]:
        for mine, first in zip(stop["updates"], here["moves"][0]["updates"], strict=True):
            assert mine == pytest.approx(first, rel=2e-2)


def test_what_does_not_fit_is_refused(
    cases: dict[str, tuple[Path, LoraConfig]], tied_qwen2: Path, exports: Path, everyone: Any
) -> None:
    """Another rank, scale, base or other linears, all in one message; a target that names no linear."""
    model, lora = cases["dense"]
    hf, folder = read_hf_config(model), exports / "dense/adapter"
    table = AdapterTable(family_of(hf), hf, RANK, lora.targets)
    table.read(folder, model, ALPHA)
    with pytest.raises(
        ModelError, match=r"r is 3, and the run's is 4; lora_alpha is 5, .* has other weights than .*; 56 t"
    ):
        AdapterTable(family_of(hf), hf, 4, ["q_proj"]).read(folder, tied_qwen2, 8.0)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_rslora": True, "alpha_pattern": {"q": 1}}))
    with pytest.raises(ModelError, match="fit: use_rslora, alpha_pattern: its scale is not"):
        table.read(folder, model, ALPHA)
    with pytest.raises(ModelError, match="is no folder of adapters"):
        table.read(model, model, ALPHA)
    with pytest.raises(ModelError, match="ends in qproj, norm; did you mean q_proj"):
        AdapterTable(family_of(hf), hf, RANK, ("qproj", "norm", "mlp.up_proj"))
