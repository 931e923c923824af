"""Every rank reads what it holds, rank 0 also what it gathers, and compares it with the HF folder: run by test_slices.

slices_worker.py OUT MODEL PARALLEL_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy


def main() -> None:
    out, model, parallel_json = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    parallel = ParallelConfig(**json.loads(parallel_json))
    start_process_group(60)
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(), mesh)
    tensors = load_file(model / "model.safetensors")
    held = policy.weights.holdings()
    wrong, read = [], 0
    for holding in held:
        if mesh.rank in holding.ranks:
            expected = tensors[holding.name][tuple(slice(*bounds) for bounds in holding.box)]
            if not torch.equal(policy.weights.read(holding.name, holding.box), expected):
                wrong.append((holding.name, holding.box))
            read += expected.numel()
    gathered = list(policy.weights)
    if mesh.rank == 0:
        wrong += [(name, "gathered") for name, tensor in gathered if not torch.equal(tensor, tensors[name])]
    if [name for name, _ in gathered] != [name for name, _, _ in policy.weights.metadata()]:
        wrong.append(("gathered", "order"))
    value = policy.weights.from_rank_0("of rank 0" if mesh.rank == 0 else None)
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, (wrong, read, value), group=mesh.control)
    if mesh.rank == 0:
        out.write_text(json.dumps(everyone))
    stop_process_group()


if __name__ == "__main__":
    main()
