"""Bits flip in a parameter's copy, and in the ranks' own state, as they lie idle; and rank 1 is slow in an update.

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
from or1_megatron.parallel.idle_state import IdleState, StateChanged
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


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of a float32 tensor's element 5, in place."""
    tensor.data.view(-1).view(torch.int32)[5] ^= torch.tensor(-(1 << 31) if bit == 31 else 1 << bit, dtype=torch.int32)


def idle_state_changes(policy: MegatronPolicy) -> list[str]:
    """What is said when nothing flips; when a bit of rank 1's master weights does and one of rank 2's moments; when one
    of rank 0's parameters does while the optimizer's state is on the host; and when one does there."""
    idle, rank, said = IdleState(policy), policy.mesh.rank, []
    inner = policy.optimizer.chained_optimizers[0].optimizer
    master = inner.param_groups[0]["params"][0]
    moment = inner.state[master]["exp_avg_sq"]
    for case in ("nothing", "optimizer", "parameter", "host"):
        if case in ("parameter", "host"):
            policy.host.offload("optimizer")
        idle.note()
        if case == "optimizer" and rank > 0:
            flip(master if rank == 1 else moment, 0 if rank == 1 else 31)
        if case == "parameter" and rank == 0:
            dict(policy.networks[0].named_parameters())[FLIPPED].data.view(torch.int16).view(-1)[7] ^= 1
        on_host = policy.host._state._slabs
        if case == "host" and rank == 0:
            on_host[0][100] ^= 1
        if case == "parameter":
            policy.host.restore("optimizer")
        try:
            idle.check(4, last=False)
            said.append("")
        except StateChanged as error:
            said.append(str(error))
        if case == "host" and rank == 0:
            on_host[0][100] ^= 1
    policy.host.restore("optimizer")
    return said


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
    idle = idle_state_changes(policy)
    waited = 0 < report.waited_s <= report.forward_backward_s
    told = {"said": said, "idle": idle, "slowest": report.slowest_rank, "waited": waited}
    everyone: list = [None] * mesh.world
    dist.all_gather_object(everyone, told, group=mesh.control)
    if mesh.rank == 0:
        out.write_text(json.dumps(everyone))
    stop_process_group()


if __name__ == "__main__":
    main()
