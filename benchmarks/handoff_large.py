"""A handoff of 2 GB on one machine: where its seconds go, by turns with a checkout of another commit.

    git worktree add /tmp/before 5408816
    python benchmarks/handoff_large.py --before /tmp/before --turns 2

A policy with the shape of Qwen2.5-0.5B, random weights in fp32, on one trainer rank hands off to one engine over shared
memory, with the default bucket and one thread each. A turn starts both anew; its first handoff, in which they meet, is
not counted. Both commits run with this environment's packages. Parts are seconds of a handoff inside the functions in
``TRAINER_PARTS`` and ``ENGINE_PARTS``; parts of the two sides overlap in time. Beside that, what the packing is for:
the products of one layer of the model, with weights as they are and as vLLM packs them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handoff import forget_peak, make_model, peak_bytes
from result import ROOT, figure, write_result

HANDOFFS = 6
AT_MOST_S = 3.0
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TRAINER_PARTS = {
    "trainer packs, checksums included": ("or1_megatron.handoff.shard.transfer", "pack"),
    "trainer's checksums": ("or1_megatron.handoff.message.checksum", "host_sum"),
    "engines compare and finish": ("or1_megatron.rollout.engine_group", "EngineGroup.finish_weight_update"),
}
ENGINE_PARTS = {
    "engine receives and loads": ("or1_megatron.handoff.shard.worker", "_Connection.receive"),
    "engine's oneDNN packing": ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"),
    "engine's checksums": ("or1_megatron.handoff.message.checksum", "host_sum"),
    "engine copies, packs, checks": ("or1_megatron.handoff.shard.direct_copy", "DirectCopy.copy"),
}
"""Name to (module, function): inclusive seconds."""


def timed(parts: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Make each function add its seconds to what is returned, from now on."""
    seconds: dict[str, float] = defaultdict(float)
    for part, (module, path) in parts.items():
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)

        def call(*args: Any, real: Any = getattr(owner, name), part: str = part, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - began

        setattr(owner, name, call)
    return seconds


def in_engine(handle: Any, function: Callable[[Any], Any]) -> Any:
    """``function(EngineActor)``, in the engine's process."""
    import ray

    return ray.get(handle.__ray_call__.remote(function), timeout=240)


def start_timing(actor: Any) -> None:
    actor.seconds = timed(ENGINE_PARTS)


def engine_seconds(actor: Any) -> dict[str, float]:
    """Seconds since the last call, and what the engine's memory has grown by, at most, in GiB."""
    found = {**actor.seconds, "peak": peak_bytes()}
    actor.seconds.clear()
    found["resident"] = forget_peak()
    return found


def worker(model: Path, out: Path, transport: str, bucket_bytes: int) -> None:
    import torch

    from or1_megatron.config.schema import HandoffConfig, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
    from or1_megatron.handoff.sender import make_sender
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from or1_megatron.parallel.policy import MegatronPolicy
    from or1_megatron.rollout.cluster import start_ray, stop_ray
    from or1_megatron.rollout.pool import EnginePool

    torch.set_num_threads(1)
    start_process_group(900)
    parallel = ParallelConfig(ranks=1)
    mesh = build_mesh(parallel, seed=1, timeout_s=900)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(), mesh)
    start_ray(None, "benchmark-handoff-large")
    rollout = RolloutConfig(engines=1, kv_cache_bytes=64 << 20)
    pool = EnginePool(rollout, model, "float32", 128, "benchmark-handoff-large", True)
    pool.wait_ready()
    config = HandoffConfig(transport=transport, bucket_bytes=bucket_bytes)
    sender: Any = make_sender(policy.weights, 0, config, pool.control(300))
    ours = timed(TRAINER_PARTS)
    in_engine(pool.handles[0], start_timing)
    handoffs = []
    for version in range(1, HANDOFFS + 1):
        before = forget_peak()
        ours.clear()
        began = time.perf_counter()
        sender.send(version)
        seconds = {"a handoff": time.perf_counter() - began, **ours}
        seconds["trainer's extra memory"] = (peak_bytes() - before) / 2**30
        seconds |= in_engine(pool.handles[0], engine_seconds)
        handoffs.append(seconds)
    out.write_text(json.dumps(handoffs[1:]))
    sender.close()
    pool.close()
    stop_ray()
    stop_process_group()


def products(out: Path) -> None:
    """Write how many times as long a layer's products take with weights that are not packed, by number of tokens."""
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 128
    shapes = ((hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    weights = [torch.randn(shape) for shape in shapes * 6]  # more than the caches hold
    packed = [_custom_ops.create_onednn_mm(weight.clone().t(), 32) for weight in weights]

    def seconds(run: Callable[[Any, Any], Any], inputs: dict[int, Any]) -> float:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            for weight, copy in zip(weights, packed, strict=True):
                run(inputs[weight.shape[1]], weight if run is plain else copy)
            times.append(time.perf_counter() - began)
        return min(times)

    def plain(x: Any, weight: Any) -> Any:
        return torch.nn.functional.linear(x, weight)

    found = {}
    for tokens in (16, 256):
        inputs = {size: torch.randn(tokens, size) for size in (hidden, inner)}
        found[tokens] = seconds(plain, inputs) / seconds(lambda x, copy: _custom_ops.onednn_mm(copy, x, None), inputs)
    out.write_text(json.dumps(found))


def answer(tree: Path, out: Path, *arguments: str) -> Any:
    """Return what this program, called with these arguments and the package of ``tree``, writes to ``out``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=False, env=environment, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(out.read_text())


def turn(tree: Path, model: Path, transport: str, bucket_bytes: int) -> list[dict[str, float]]:
    """Return the seconds of each handoff by part, with the package of ``tree``."""
    out = model / "handoffs.json"
    handoffs: list[dict[str, float]] = answer(tree, out, "worker", str(model), str(out), transport, str(bucket_bytes))
    resident = handoffs[0]["resident"]
    for each in handoffs:
        each["engine's memory"] = resident / 2**30
        each["engine's extra memory"] = (each.pop("peak") - resident) / 2**30
        del each["resident"]
    return handoffs


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
        return
    if sys.argv[1:2] == ["products"]:
        products(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--transport", default="shared_memory")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    arguments = parser.parse_args()
    trees = [ROOT] if arguments.before is None else [arguments.before.resolve(), ROOT]
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as name:
        import torch

        gains = answer(ROOT, Path(name) / "gains.json", "products", str(Path(name) / "gains.json"))

        make_model(Path(name), SHAPE, torch.float32)
        for number in range(arguments.turns):
            for tree in trees if number % 2 == 0 else trees[::-1]:
                found[tree] += turn(tree, Path(name), arguments.transport, arguments.bucket_bytes)
                last = [round(each["a handoff"], 2) for each in found[tree][1 - HANDOFFS :]]
                print(f"turn {number + 1}, {tree.name}: {last} s", flush=True)
    medians = {
        tree: {part: statistics.median(each.get(part, 0.0) for each in of) for part in of[0]}
        for tree, of in found.items()
    }
    figures: dict[str, Any] = {}
    for tree, parts in medians.items():
        for part, value in parts.items():
            limit = {"at_most": AT_MOST_S} if part == "a handoff" and tree == ROOT else {}
            who = "" if tree == ROOT else ", the other"
            figures[part + who] = figure(value, "GiB" if "memory" in part else "s", **limit)
    settings: dict[str, Any] = {"shape": SHAPE, "dtype": "float32", "transport": arguments.transport}
    settings["bucket bytes"] = arguments.bucket_bytes
    if arguments.before is not None:
        other = medians[trees[0]]["a handoff"] / medians[ROOT]["a handoff"]
        figures["times as fast as the other"] = figure(other)
        asked = ["git", "rev-parse", "--short", "HEAD"]
        settings["other commit"] = subprocess.run(asked, cwd=trees[0], capture_output=True, text=True).stdout.strip()
    for tokens, gain in gains.items():
        figures[f"products of {tokens} tokens, not packed / packed"] = figure(gain)
    path = write_result("handoff_large", figures, {**settings, "turns": arguments.turns, "per turn": HANDOFFS - 1})
    print(json.dumps(figures, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
