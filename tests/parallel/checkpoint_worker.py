"""Under torchrun: train two steps and save (mode save), or load; then one more step. JSON from rank 0."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import problem
import torch

from or1_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel import checkpoint
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy

STATE = {"step": 2, "ledger": {"a": [1, 2]}}


def main() -> None:
    out, model, layout, mode, folder = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
    torch.set_num_threads(1)
    start_process_group(60)
    parallel = ParallelConfig(**layout)
    mesh = build_mesh(parallel, seed=1)
    config = OptimizerConfig(lr=1e-3, warmup_steps=10)
    policy = MegatronPolicy(ModelConfig(hf=Path(model), dtype="float32"), parallel, config, mesh)
    batch = problem.batch(mesh.data, 64)

    def update() -> tuple[float, float, float]:
        report = policy.update(batch.ranks[mesh.data_rank], problem.WeightedLogProb(), batch.token_count)
        return report.sums["loss"], report.grad_norm, report.learning_rate

    state = None
    if mode == "save":
        update()
        update()
        torch.manual_seed(mesh.rank + 17)
        random.seed(5)
        checkpoint.save(policy, folder, STATE)
    else:
        state = checkpoint.load(policy, folder)
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    result = {"state": state, "updates": [update(), update()], "draws": draws}
    if mesh.rank == 0:
        Path(out).write_text(json.dumps(result))
    stop_process_group()


if __name__ == "__main__":
    main()
