"""Measures which layout is faster for the quickstart's policy on two ranks: tensor 2 or pipeline 2.

    python benchmarks/quickstart_layout.py

Runs the two in turn, A B A B, each in a fresh torchrun of two single-threaded ranks: updates of its model on
a batch like those of its steps. Prints each layout's median seconds per update and their ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "quickstart" / "base_model"
LAYOUTS = {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}}
ROW_TOKENS = (2048, 4096)
SAMPLES = 320
UPDATES = 6
ROUNDS = 2


def worker(layout: dict[str, int], row_tokens: int, out: Path) -> None:
    """Run one rank: updates on random responses of 20 to 60 tokens; rank 0 writes their seconds."""
    from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from or1_megatron.parallel.policy import MegatronPolicy
    from or1_megatron.rl.batch import pack
    from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
    from or1_megatron.rl.packing import BatchLayout
    from or1_megatron.types import Sample

    torch.set_num_threads(1)
    start_process_group(60)
    parallel = ParallelConfig(ranks=2, micro_batch_tokens=row_tokens, **layout)
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=MODEL, dtype="float32"), parallel, OptimizerConfig(), mesh)
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(SAMPLES):
        n = int(rng.integers(20, 60))
        ids = rng.integers(0, policy.hf["vocab_size"], n + 13, dtype=np.int32)
        zeros, ones = np.zeros(n, dtype=np.float32), np.ones(n, dtype=np.bool_)
        samples.append(Sample(ids[:13], ids[13:], float(rng.normal()), ones, zeros))
    batch = pack(samples, BatchLayout(1, row_tokens, 4))
    objective = ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.01, temperature=1.0, on_policy=True)
    reports = [policy.update(batch.ranks[0], objective, batch.token_count) for _ in range(UPDATES)]
    if mesh.rank == 0:
        out.write_text(json.dumps([r.forward_backward_s + r.optimizer_s for r in reports[1:]]))
    stop_process_group()


def measure(layout: dict[str, int], row_tokens: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        subprocess.run(
            [*command, "worker", json.dumps(layout), str(row_tokens), str(out)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        seconds: list[float] = json.loads(out.read_text())
        return seconds


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return
    for row_tokens in ROW_TOKENS:
        seconds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
        for _ in range(ROUNDS):
            for name, layout in LAYOUTS.items():
                seconds[name] += measure(layout, row_tokens)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        shown = ", ".join(f"{name} {median:.3f} s" for name, median in medians.items())
        ratio = medians["tensor 2"] / medians["pipeline 2"]
        print(f"rows of {row_tokens} tokens: {shown} per update; tensor 2 takes {ratio:.2f} times pipeline 2")


if __name__ == "__main__":
    main()
