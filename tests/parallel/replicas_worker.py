"""A bit flips in rank 1's copy of one parameter, and the ranks compare their replicas: run by test_replicas.

replicas_worker.py OUT MODEL PARALLEL_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.replicas import ReplicasDiffer, check_replicas

FLIPPED = "embedding.word_embeddings.weight"


def main() -> None:
    out, model, parallel_json = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    parallel = ParallelConfig(**json.loads(parallel_json))
    start_process_group(60)
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="bfloat16"), parallel, OptimizerConfig(), mesh)
    check_replicas(policy, 1)
    said = []
    for bit in (0, 15):
        weight = dict(policy.networks[0].named_parameters())[FLIPPED]
        if mesh.rank == 1:
            weight.data.view(torch.int16).view(-1)[7] ^= torch.tensor(-(1 << 15) if bit == 15 else 1, dtype=torch.int16)
        try:
            check_replicas(policy, 2)
            said.append("")
        except ReplicasDiffer as error:
            said.append(str(error))
        if mesh.rank == 1:
            weight.data.view(torch.int16).view(-1)[7] ^= torch.tensor(-(1 << 15) if bit == 15 else 1, dtype=torch.int16)
    check_replicas(policy, 3)
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, said, group=mesh.control)
    if mesh.rank == 0:
        out.write_text(json.dumps(everyone))
    stop_process_group()


if __name__ == "__main__":
    main()
