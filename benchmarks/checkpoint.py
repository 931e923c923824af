"""Measures how long an asynchronous save blocks the training loop, beside a memory copy of the same state.

    python benchmarks/checkpoint.py [--rounds 9]

A random model of 30 million parameters (fp32: 0.4 GB with Adam's moments) on one rank, on two by tensor parallelism,
and on two by data parallelism with the distributed optimizer. One process does in turn: clone every tensor that the
rank writes, copy them into allocated memory, save (until ``save`` returns), update while that save is written, update
alone. Each time is that of the slower rank; figures are ratios of medians. The first save is listed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from result import ROOT, figure, write_result

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "1 rank": {"ranks": 1},
    "2 ranks, tensor 2": {"ranks": 2, "tensor": 2},
    "2 ranks, data 2": {"ranks": 2},
}
VOCABULARY = 24_576
ROW_TOKENS = 512


def make_model(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1280,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=ROW_TOKENS,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def worker(model: Path, layout: Mapping[str, int], rounds: int, scratch: Path, out: Path) -> None:
    """Run one rank; rank 0 writes the seconds of every round by name."""
    from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from or1_megatron.parallel.policy import MegatronPolicy
    from or1_megatron.parallel.saver import CheckpointSaver
    from or1_megatron.parallel.sharded_state import local_shards
    from or1_megatron.rl.batch import pack
    from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
    from or1_megatron.rl.packing import BatchLayout
    from or1_megatron.types import Sample

    torch.set_num_threads(1)
    start_process_group(300)
    parallel = ParallelConfig(**layout, micro_batch_tokens=ROW_TOKENS)  # type: ignore[arg-type]
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(), mesh)
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(8):
        ids = rng.integers(0, VOCABULARY, 60, dtype=np.int32)
        ones = np.ones(50, dtype=np.bool_)
        samples.append(Sample(ids[:10], ids[10:], float(rng.normal()), ones, np.zeros(50, dtype=np.float32)))
    batch = pack(samples, BatchLayout(mesh.data, ROW_TOKENS, 4))
    objective = ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.01, temperature=1.0, on_policy=True)
    saver = CheckpointSaver(policy)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        """Record the slower rank's seconds; the result of ``call`` is freed after that."""
        dist.barrier()
        started_s = time.perf_counter()
        kept = call()
        spent = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        times.setdefault(name, []).append(float(spent))
        del kept

    def update() -> None:
        policy.update(batch.ranks[mesh.data_rank], objective, batch.token_count)

    update()
    written = [shard.tensor() for shard in local_shards(policy) if shard.is_written_here]
    warm = [tensor.clone() for tensor in written]
    for number in range(rounds + 1):
        timed("clone", lambda: [tensor.clone() for tensor in written])
        timed("warm copy", lambda: [a.copy_(b) for a, b in zip(warm, written, strict=True)])
        timed("save", lambda n=number: saver.save(scratch / f"step_{n:06d}", {"step": n}))  # type: ignore[misc]
        timed("update beside a write", update)
        timed("write", lambda: saver.finish(wait=True))
        dist.barrier()
        if mesh.rank == 0:
            shutil.rmtree(scratch / f"step_{number:06d}")
        timed("update", update)
    size = torch.tensor(sum(tensor.nbytes for tensor in written), dtype=torch.float64)
    dist.all_reduce(size)
    if mesh.rank == 0:
        out.write_text(json.dumps({"bytes": float(size), "times": times}))
    saver.close()
    stop_process_group()


def measure(model: Path, layout: Mapping[str, int], rounds: int, folder: Path) -> dict[str, Any]:
    out = folder / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout['ranks']}"]
    arguments = ["--worker", str(model), json.dumps(layout), str(rounds), str(folder), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*command, __file__, *arguments], check=True, env=environment)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        model, layout, rounds, scratch, out = sys.argv[2:]
        worker(Path(model), json.loads(layout), int(rounds), Path(scratch), Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds: int = parser.parse_args().rounds
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        for name, layout in LAYOUTS.items():
            found = measure(model, layout, rounds, Path(scratch))
            times: dict[str, list[float]] = found["times"]
            median = {what: statistics.median(values[1:]) for what, values in times.items()}
            figures |= {
                f"{name}: loop held / memory copy of the state": figure(median["save"] / median["clone"], at_most=1.5),
                f"{name}: first save / memory copy": figure(times["save"][0] / median["clone"]),
                f"{name}: loop held / copy into memory that is there": figure(median["save"] / median["warm copy"]),
                f"{name}: loop held": figure(median["save"], "s"),
                f"{name}: memory copy": figure(median["clone"], "s"),
                f"{name}: written in the background": figure(median["update beside a write"] + median["write"], "s"),
                f"{name}: update beside a write / alone": figure(median["update beside a write"] / median["update"]),
                f"{name}: state": figure(found["bytes"] / 1e9, "GB"),
            }
    for name, entry in figures.items():
        print(f"{name}: {entry['value']:.3g} {entry['unit']}")
    write_result("checkpoint", figures, {"rounds": rounds, "dtype": "float32", "threads per rank": 1})


if __name__ == "__main__":
    main()
