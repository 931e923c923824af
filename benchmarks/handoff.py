"""What a handoff costs on CPU: slices from every trainer rank, against gathering on rank 0 and broadcasting.

    python benchmarks/handoff.py [ROUNDS]       (two rounds by default: about ten minutes)

A policy of 100M parameters in bf16 at TP2 x PP2 (four torchrun ranks) hands off to two engines of one rank, then to two
of two ranks; the backends ``gloo`` and ``shard`` by turns, each to engines of its own, in one run. Every rank has one
thread. Reported are medians over all handoffs but the first of each turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result import figure, write_result

ROOT = Path(__file__).resolve().parents[1]
BUCKET_BYTES = 16 << 20
HANDOFFS = 6
TRAINER_RANKS = 4
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def forget_peak() -> int:
    """The resident bytes now, from which the next peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def worker(model: Path, out: Path, rounds: int) -> None:
    """One trainer rank. Rank 0 starts the engines too, and writes what was measured."""
    import torch
    import torch.distributed as dist

    from or1_megatron.config import HandoffConfig, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
    from or1_megatron.handoff.sender import EngineWeightSender
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from or1_megatron.parallel.policy import MegatronPolicy
    from or1_megatron.rollout.cluster import start_ray, stop_ray
    from or1_megatron.rollout.pool import EnginePool

    torch.set_num_threads(1)
    start_process_group(900)
    parallel = ParallelConfig(ranks=TRAINER_RANKS, tensor=2, pipeline=2)
    mesh = build_mesh(parallel, seed=1, timeout_s=900)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="bfloat16"), parallel, OptimizerConfig(), mesh)
    if mesh.rank == 0:
        start_ray(None, "benchmark-handoff")
    turns = []
    for number in range(rounds):
        for tensor in (1, 2):
            for backend in ("gloo", "shard"):
                config = HandoffConfig(backend=backend, bucket_bytes=BUCKET_BYTES, timeout_s=300)
                pool, control = None, None
                if mesh.rank == 0:
                    rollout = RolloutConfig(engines=2, tensor_parallel=tensor, kv_cache_bytes=16 << 20)
                    name = f"benchmark-{number}-{tensor}-{backend}"
                    pool = EnginePool(rollout, model, "bfloat16", 128, name, True, weight_transfer=backend)
                    pool.wait_ready()
                    control = pool.control(300)
                sender = EngineWeightSender(policy.weights, mesh.rank, config, control)
                turn = measure(sender, mesh)
                if mesh.rank == 0:
                    assert pool is not None and control is not None and control.versions() == [HANDOFFS] * 2
                    sharded = sender._sharded
                    received = list(sharded.received.values()) if sharded else [turn["bytes"]] * 2 * tensor
                    turns.append({**turn, "tensor": tensor, "backend": backend, "received": received})
                    print(f"TP{tensor} {backend}: {[round(s, 2) for s in turn['seconds']]} s", flush=True)
                sender.close()
                if pool is not None:
                    pool.close()
    if mesh.rank == 0:
        out.write_text(json.dumps(turns))
        stop_ray()
    dist.barrier(mesh.control)
    stop_process_group()


def measure(sender: Any, mesh: Any) -> dict[str, Any]:
    """Seconds of each handoff but the first, and the most that any trainer rank's memory grew in one."""
    import torch.distributed as dist

    seconds, grown, size = [], 0, 0
    for version in range(1, HANDOFFS + 1):
        dist.barrier(mesh.control)
        before = forget_peak()
        started = time.perf_counter()
        size = sender.send(version)
        dist.barrier(mesh.control)
        if version > 1:
            seconds.append(time.perf_counter() - started)
            grown = max(grown, peak_bytes() - before)
    everyone: list[int] = [0] * mesh.world
    dist.all_gather_object(everyone, grown, group=mesh.control)
    return {"seconds": seconds, "extra_bytes": everyone, "bytes": size}


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    from or1_megatron.plan_handoff import expected_wants
    from or1_megatron.weights.families import family_of, read_hf_config
    from or1_megatron.weights.holdings import box_size

    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "turns.json"
        make_model(folder)
        hf = read_hf_config(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TRAINER_RANKS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, __file__, "worker", str(folder), str(out), str(rounds)], check=True, env=environment)
        turns = json.loads(out.read_text())
    figures: dict[str, Any] = {}
    for tensor, goal in ((1, 1.3), (2, 2.0)):
        of = {b: [t for t in turns if t["tensor"] == tensor and t["backend"] == b] for b in ("gloo", "shard")}
        medians = {b: statistics.median(s for turn in of[b] for s in turn["seconds"]) for b in of}
        wants = [expected_wants(family_of(hf), hf, rank, tensor) for rank in range(tensor)] * 2
        shards = [2 * sum(box_size(want.box) for want in each) for each in wants]
        shares = [got / shard for turn in of["shard"] for got, shard in zip(turn["received"], shards, strict=True)]
        to = f"to two engines of TP{tensor}"
        for backend, median in medians.items():
            figures[f"{backend} {to}"] = figure(median, "s")
        figures[f"gloo over shard {to}"] = figure(medians["gloo"] / medians["shard"], at_least=goal)
        figures[f"received over shard {to}, largest"] = figure(max(shares), at_most=1.05)
        extra = max(size for turn in of["shard"] for size in turn["extra_bytes"]) / BUCKET_BYTES
        figures[f"trainer rank's extra memory {to}, in buckets"] = figure(extra, at_most=2.0)
        gathered = max(size for turn in of["gloo"] for size in turn["extra_bytes"]) / BUCKET_BYTES
        figures[f"the same with gloo {to}, in buckets"] = figure(gathered)
    settings = {"shape": SHAPE, "dtype": "bfloat16", "trainer": "TP2 PP2", "engines": 2, "bucket bytes": BUCKET_BYTES}
    path = write_result("handoff", figures, {**settings, "handoffs per turn": HANDOFFS - 1, "rounds": rounds})
    print(json.dumps(figures, indent=2))
    print(path)


if __name__ == "__main__":
    main()
