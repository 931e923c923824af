"""A bit flips in a parameter's copy; and rank 1 is slow in an update.

Run by test_replicas: replicas_worker.py OUT MODEL PARALLEL_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from problem import WeightedLogProb, batch
from waiting import wait_until

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel import policy as policy_module
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.replicas import ReplicasDiffer, check_replicas
from or1_megatron.types import UpdateReport

FLIPPED = "embedding.word_embeddings.weight"


def update_with_a_slow_rank(policy: MegatronPolicy, seen: Path) -> UpdateReport:
    """Update. The others begin after rank 1, which goes on when they wait for it."""
    rank, sum_grads = policy.mesh.rank, policy_module.finalize_model_grads

    def arrive(*arguments: Any, **named: Any) -> None:
        (seen / f"arrived {rank}").touch()
        sum_grads(*arguments, **named)

    def hold(*_: Any) -> None:
        (seen / "begun").touch()
        wait_until(lambda: all((seen / f"arrived {other}").exists() for other in (0, 2)), "the other ranks")

    seen.mkdir(exist_ok=True)
    policy_module.finalize_model_grads = arrive
    if rank == 1:
        policy.networks[0].register_forward_pre_hook(hold)
    else:
        wait_until((seen / "begun").exists, "rank 1")
    rows = batch(3, 64)
    return policy.update(rows.ranks[rank], WeightedLogProb(), rows.token_count)


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
    report = update_with_a_slow_rank(policy, out.with_name("seen"))
    waited = 0 < report.waited_s <= report.forward_backward_s
    told = {"said": said, "slowest": report.slowest_rank, "waited": waited}
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, told, group=mesh.control)
    if mesh.rank == 0:
        out.write_text(json.dumps(everyone))
    stop_process_group()


if __name__ == "__main__":
    main()
