"""Two ranks: a run continues after an asynchronous save, and again from the save; other states travel from layout to
layout, each of which loads what the one before has saved. JSON from rank 0."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import problem
import torch
from megatron.core import dist_checkpointing, parallel_state

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel import checkpoint
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.saver import CheckpointSaver
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout

STATE = {"step": 2, "ledger": {"a": [1, 2]}}
CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=10)


class Rank:
    """One rank's policy at one layout; ends the layout before."""

    def __init__(self, model: Path, dtype: str, layout: Mapping[str, Any]) -> None:
        parallel_state.destroy_model_parallel()
        parallel = ParallelConfig(ranks=2, **layout)
        self.mesh: Mesh = build_mesh(parallel, seed=1)
        self.policy = MegatronPolicy(ModelConfig(hf=model, dtype=dtype), parallel, CONFIG, self.mesh)  # type: ignore[arg-type]
        between = 2 * parallel.context if parallel.context > 1 else 1
        self._batch = pack(problem.samples(), BatchLayout(self.mesh.data, 128, 8, sequence_alignment=between))

    def update(self) -> list[float]:
        report = self.policy.update(
            self._batch.ranks[self.mesh.data_rank], problem.WeightedLogProb(), self._batch.token_count
        )
        return [report.sums["loss"], report.grad_norm, report.learning_rate]

    def save(self, folder: Path) -> None:
        CheckpointSaver(self.policy, asynchronous=False).save(folder, STATE)


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def save_and_resume(model: Path, folder: Path) -> dict[str, Any]:
    """Two updates, a save, two more updates while it is written; then the last two again from the checkpoint."""
    layout = {"tensor": 2}
    first = Rank(model, "float32", layout)
    first.update()
    first.update()
    torch.manual_seed(first.mesh.rank + 17)
    random.seed(5)
    saver = CheckpointSaver(first.policy)
    saver.save(folder, STATE)
    went_on = {"draws": draws(), "updates": [first.update(), first.update()]}
    saver.finish(wait=True)
    saver.save(folder.with_name("step_000004"), STATE)  # over the same buffers
    third = first.update()
    saver.close()

    second = Rank(model, "float32", layout)
    state = checkpoint.load(second.policy, folder)
    resumed = {"draws": draws(), "updates": [second.update(), second.update()]}
    later = Rank(model, "float32", layout)
    checkpoint.load(later.policy, folder.with_name("step_000004"))
    return {"state": state, "went_on": went_on, "resumed": resumed, "third": [third, later.update()]}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of a checkpoint whole, by Megatron's own loader, and cut the vocabulary's padding."""
    state = dist_checkpointing.load_plain_tensors(str(folder))
    assert state.pop("sgd_steps") == state.pop("optimizer_step") == 2
    tensors = state.items()
    return {name: t[: problem.VOCABULARY] if "embed" in name or "output" in name else t for name, t in tensors}


def travel(model: Path, dtype: str, layouts: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    """Return for each layout: the tensors, those that differ from the first checkpoint's, and two updates."""
    scratch.mkdir(exist_ok=True)
    first = Rank(model, dtype, layouts[0])
    first.update()
    first.update()
    folder = scratch / "0"
    first.save(folder)
    expected = whole(folder)
    told = [{"tensors": sorted(expected), "differ": [], "updates": [first.update(), first.update()]}]
    for number, layout in enumerate(layouts[1:], start=1):
        rank = Rank(model, dtype, layout)
        checkpoint.load(rank.policy, folder)
        folder = scratch / str(number)
        rank.save(folder)
        found = whole(folder)
        differ = [n for n in expected.keys() | found.keys() if n not in found or not torch.equal(found[n], expected[n])]
        told.append({"tensors": sorted(found), "differ": sorted(differ), "updates": [rank.update(), rank.update()]})
    return told


def main() -> None:
    out, model, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])  # plan: [name, model, dtype, layouts]
    torch.set_num_threads(1)
    start_process_group(60)
    scratch = Path(out).parent
    result = {
        "resume": save_and_resume(model, scratch / "step_000002"),
        "travels": {name: travel(Path(hf), dtype, layouts, scratch / name) for name, hf, dtype, layouts in plan},
    }
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    stop_process_group()


if __name__ == "__main__":
    main()
