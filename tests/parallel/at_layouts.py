"""Functions that tests run on ranks at one layout after another: compare with transformers, export, save and load."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import problem
import ranks
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed import distributed_c10d

from or1_megatron.checkpoint import loader
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.parity import measure_on_ranks
from or1_megatron.parallel.policy import MegatronPolicy, export_hf
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.sizing.parallel_layouts import parse_layout
from or1_megatron.types import MicroBatch

STATE = {"step": 2, "ledger": {"a": [1, 2]}}


def export(model: Path, layout: str, target: Path, store: dist.Store, rank: int) -> None:
    parallel = parse_layout(layout, 40).parallel
    if rank >= parallel.ranks:
        return
    start_process_group(ranks.TIMEOUT_S, SubWorld(parallel.ranks, store, str(target)))
    try:
        mesh = build_mesh(parallel, seed=1)
        export_hf(MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(), mesh), target)
    finally:
        stop_process_group()


def compare_and_export(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Return check-parity's rows by case and layout; export to ``folder``/<case>/<layout>.

    A case has a ``model``, ``layouts`` to compare, layouts to ``export`` from, and more of check-parity's task.
    """
    store, rank, _ = next(dist.rendezvous("env://"))
    rows = {}
    for name, case in cases.items():
        (folder / name).mkdir(exist_ok=True)
        probe = {"sequences": 12, "longest": 40, "seed": 1}
        task = {**probe, **case, "model": {"hf": str(case["model"]), "dtype": "float32"}}
        exported = task.pop("export", [])
        rows[name] = {row["name"]: row for row in measure_on_ranks(task, name, store, rank)}
        for layout in exported:
            export(case["model"], layout, folder / name / layout.replace(" ", "_"), store, rank)
    return rows


def end_layout() -> None:
    """Free the process groups of the earlier layout, whose sockets and threads would add up."""
    dist.barrier()
    for group in [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    gc.collect()  # a policy holds its groups in cycles


class Rank:
    """One rank's policy at one layout. Making it ends the earlier layout."""

    def __init__(self, model: Path, dtype: str, layout: dict[str, Any], lora: dict[str, Any] | None = None) -> None:
        end_layout()
        parallel = ParallelConfig(ranks=2, **layout)
        self.mesh = build_mesh(parallel, seed=1)
        config = OptimizerConfig(lr=1e-3, warmup_steps=10)
        loaded = ModelConfig.model_validate({"hf": model, "dtype": dtype, "lora": lora})
        self.policy = MegatronPolicy(loaded, parallel, config, self.mesh)
        between = 2 * parallel.context if parallel.context > 1 else 1
        self._batch = pack(problem.samples(), BatchLayout(self.mesh.data, 128, 8, sequence_alignment=between))

    def rows(self) -> Sequence[MicroBatch]:
        return self._batch.ranks[self.mesh.data_rank]

    def update(self) -> list[float]:
        report = problem.update(self.policy, self._batch)
        return [report.sums["loss"], report.grad_norm, report.learning_rate]

    def save(self, folder: Path) -> None:
        CheckpointSaver(self.policy, asynchronous=False).save(folder, STATE)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of a checkpoint whole, by Megatron's own loader, and cut the vocabulary's padding."""
    state = dist_checkpointing.load_plain_tensors(str(folder))
    assert state.pop("sgd_steps") == 2
    state.pop("base", None)
    tensors = state.items()
    return {name: t[: problem.VOCABULARY] if "embed" in name or "output" in name else t for name, t in tensors}


def travel(
    model: Path, dtype: str, layouts: list[dict[str, Any]], scratch: Path, lora: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return for each layout: its tensors, the tensors that differ from the first checkpoint's, and two updates."""
    scratch.mkdir(exist_ok=True)
    first = Rank(model, dtype, layouts[0], lora)
    first.update()
    first.update()
    folder = scratch / "0"
    first.save(folder)
    expected = whole(folder)
    results = [{"tensors": sorted(expected), "differ": [], "updates": [first.update(), first.update()]}]
    for number, layout in enumerate(layouts[1:], start=1):
        rank = Rank(model, dtype, layout, lora)
        loader.load(rank.policy, folder)
        folder = scratch / str(number)
        rank.save(folder)
        tensors = whole(folder)
        differ = [
            n for n in expected.keys() | tensors.keys() if n not in tensors or not torch.equal(tensors[n], expected[n])
        ]
        results.append(
            {"tensors": sorted(tensors), "differ": sorted(differ), "updates": [rank.update(), rank.update()]}
        )
    return results
