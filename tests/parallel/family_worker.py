"""Ranks: models of several families at several layouts against transformers, and their exports.

Arguments: JSON out, JSON list of (name, model folder, layouts to compare, layouts to export from, sequences of the
probe, tokens of the longest, and if it is not the recipe's the objective and its parameters), folder for exports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from or1_megatron.config.schema import ModelConfig, OptimizerConfig
from or1_megatron.parallel.check_parity import measure_on_ranks
from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy, export_hf
from or1_megatron.sizing.parallel_layouts import parse_layout


def export(model: Path, layout: str, target: Path, store: dist.Store, rank: int) -> None:
    parallel = parse_layout(layout, 40).parallel
    if rank >= parallel.ranks:
        return
    start_process_group(60, SubWorld(parallel.ranks, store, str(target)))
    try:
        mesh = build_mesh(parallel, seed=1)
        export_hf(MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(), mesh), target)
    finally:
        stop_process_group()


def main() -> None:
    out, plan, exports = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store, rank, _ = next(dist.rendezvous("env://"))
    told: dict[str, dict[str, Any]] = {}
    for name, model, compared, exported, sequences, longest, *objective in plan:
        folder = exports / name
        folder.mkdir(exist_ok=True)
        probe = {"sequences": sequences, "longest": longest, "seed": 1}
        task = {**probe, "model": {"hf": model, "dtype": "float32"}, "layouts": compared}
        task |= dict(zip(("objective", "args"), objective, strict=False))
        told[name] = {row["name"]: row for row in measure_on_ranks(task, name, store, rank)}
        for layout in exported:
            export(Path(model), layout, folder / layout.replace(" ", "_"), store, rank)
    if rank == 0:
        out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
