"""Under torchrun: scores, one gradient and three updates of a model at a layout, as JSON and two exports of rank 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import problem
import torch

from or1_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.driver import PolicyDriver, policy_verbs
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy, export_hf


def after_gradient_step(model: ModelConfig, parallel: ParallelConfig, mesh: Mesh) -> MegatronPolicy:
    """A policy after one step of an Adam without memory: every parameter p with gradient g is p - g / (|g| + 1)."""
    bare = OptimizerConfig(lr=1.0, eps=1.0, beta1=0.0, beta2=0.0, weight_decay=0.0, clip_grad=1e9)
    policy = MegatronPolicy(model, parallel, bare, mesh)
    batch = problem.batch(mesh.data, parallel.micro_batch_tokens)
    policy.update(batch.ranks[mesh.data_rank], problem.WeightedLogProb(), batch.token_count)
    return policy


def main() -> None:
    out, folder, layout, exported = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    start_process_group(60)
    parallel = ParallelConfig(**layout)
    mesh = build_mesh(parallel, seed=1)
    model = ModelConfig(hf=folder, dtype="float32")
    export_hf(after_gradient_step(model, parallel, mesh), exported.with_name("gradient"))
    policy = MegatronPolicy(model, parallel, OptimizerConfig(lr=1e-3), mesh)
    lockstep = Lockstep(mesh, policy_verbs(policy, send=lambda version: 0), deadline_s=60)
    if mesh.rank > 0:
        lockstep.serve()
    else:
        driver = PolicyDriver(lockstep)
        batch = problem.batch(mesh.data, parallel.micro_batch_tokens)
        scores = driver.score(batch, problem.TEMPERATURE)
        updates = [driver.update(batch, problem.WeightedLogProb()) for _ in range(3)]
        driver.export_hf(exported)
        result = {
            "micro_batches": len(batch.ranks[0]),
            "log_probs": [x.tolist() for x in scores.log_probs],
            "entropies": [x.tolist() for x in scores.entropies],
            "losses": [u.sums["loss"] / u.token_count for u in updates],
            "grad_norms": [u.grad_norm for u in updates],
        }
        out.write_text(json.dumps(result))
        lockstep.close()
    stop_process_group()


if __name__ == "__main__":
    main()
