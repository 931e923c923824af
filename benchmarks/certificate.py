"""What the certificate of a handoff costs on CPU: checksums as a share of the handoff, the probe as a share of a step.

    python benchmarks/certificate.py [HANDOFFS] [STEPS]       (24 handoffs and 8 steps by default: about five minutes)

Checksums: a policy of 100M parameters in bf16 at TP2 (two torchrun ranks) hands off to two engines, by turns with and
without checksums (of what is packed, of what arrives, of what the parameters hold), over each backend; every process
has one thread. Probe: a run of the quickstart's second stage, from its metrics.
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

from handoff import BUCKET_BYTES, SHAPE, make_model
from result import figure, write_result

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
TRAINER_RANKS = 2
BACKENDS = ("gloo", "shard")
STEPS_YAML = """
base: {quickstart}
run: {{dir: {run}}}
model: {{hf: {model}}}
data: {{train: [{{path: {data}/train.jsonl}}]}}
stages:
  - name: long
    steps: {steps}
    max_response_tokens: 96
    prompts_per_step: 128
    prompts_per_update: 128
    group_size: 8
evaluate: {{data: [], every_steps: 0}}
track: {{console: plain}}
"""


def use_checksums(wanted: bool) -> None:
    """In this process: compute them, or take all of them to be 0."""
    from or1_megatron.handoff.message import checksum, message
    from or1_megatron.handoff.vllm import parameter_check

    class Zeros:
        def __init__(self, slices: Any, *others: Any) -> None:
            self.found = [0] * len(slices)

        def add(self, *arguments: Any) -> None: ...

        def values(self) -> list[int]:
            return self.found

    message.Checksums = checksum.Checksums if wanted else Zeros  # type: ignore[misc, assignment]
    for user in (message, parameter_check):
        user.checksum = checksum.checksum if wanted else (lambda *arguments: 0)  # type: ignore[attr-defined]


def worker(model: Path, out: Path, handoffs: int) -> None:
    """One trainer rank. Rank 0 starts the engines too, and writes the seconds of each handoff."""
    import ray
    import torch
    import torch.distributed as dist

    from or1_megatron.config.schema import HandoffConfig, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
    from or1_megatron.handoff.sender import make_sender
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from or1_megatron.parallel.policy import MegatronPolicy
    from or1_megatron.rollout.cluster import start_ray, stop_ray
    from or1_megatron.rollout.pool import EnginePool

    torch.set_num_threads(1)
    start_process_group(900)
    parallel = ParallelConfig(ranks=TRAINER_RANKS, tensor=2)
    mesh = build_mesh(parallel, seed=1, timeout_s=900)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="bfloat16"), parallel, OptimizerConfig(), mesh)
    if mesh.rank == 0:
        start_ray(None, "benchmark-certificate")
    seconds: dict[str, list[float]] = {}
    for backend in BACKENDS:
        pool, control = None, None
        if mesh.rank == 0:
            rollout = RolloutConfig(engines=2, kv_cache_bytes=16 << 20)
            pool = EnginePool(
                rollout, model, "bfloat16", 128, f"certificate-{backend}", on_cpu=True, weight_transfer=backend
            )
            pool.wait_ready()
            control = pool.control(300)
        config = HandoffConfig(backend=backend, bucket_bytes=BUCKET_BYTES, timeout_s=300)
        sender = make_sender(policy.weights, mesh.rank, config, control)
        for version in range(handoffs + 2):
            wanted = version % 4 in (1, 2)  # not every other one: memory may be used in turns
            use_checksums(wanted)
            if pool is not None:
                ray.get([handle.__ray_call__.remote(lambda _, on=wanted: use_checksums(on)) for handle in pool.handles])
            dist.barrier(mesh.control)
            started = time.perf_counter()
            sender.send(version)
            dist.barrier(mesh.control)
            if version > 1:  # the first two, one of each kind, set things up
                kind = "with" if wanted else "without"
                seconds.setdefault(f"{backend} {kind}", []).append(time.perf_counter() - started)
        sender.close()
        if pool is not None:
            pool.close()
    if mesh.rank == 0:
        out.write_text(json.dumps(seconds))
        stop_ray()
    dist.barrier(mesh.control)
    stop_process_group()


def measure_checksums(folder: Path, handoffs: int) -> dict[str, list[float]]:
    import torch

    make_model(folder / "model", SHAPE, torch.bfloat16)
    out = folder / "seconds.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TRAINER_RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    arguments = ["worker", str(folder / "model"), str(out), str(handoffs)]
    subprocess.run([*command, __file__, *arguments], check=True, env=environment)
    seconds: dict[str, list[float]] = json.loads(out.read_text())
    return seconds


def measure_probe(folder: Path, steps: int) -> list[dict[str, float]]:
    """The metrics of a run's steps but the first."""
    data = folder / "data"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    task = [sys.executable, str(QUICKSTART / "task.py"), "--out", str(data), "--train", "1024", "--held-out", "8"]
    subprocess.run([*task, "--seed", "1"], check=True, env=environment, capture_output=True)
    config = folder / "probe.yaml"
    config.write_text(
        STEPS_YAML.format(
            quickstart=QUICKSTART / "quickstart.yaml",
            run=folder / "run",
            model=QUICKSTART / "base_model",
            data=data,
            steps=steps,
        )
    )
    subprocess.run(
        [sys.executable, "-m", "or1_megatron.commands.app", "train", str(config)], check=True, env=environment
    )
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "handoff/probe_s" in row][1:]


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    handoffs = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for backend, seconds in _by_backend(measure_checksums(Path(name), handoffs)).items():
            paid, free = statistics.median(seconds["with"]), statistics.median(seconds["without"])
            figures[f"{backend}: handoff with checksums"] = figure(paid, "s")
            figures[f"{backend}: handoff without"] = figure(free, "s")
            figures[f"{backend}: checksums over handoff"] = figure((paid - free) / paid, "share", at_most=0.10)
        rows = measure_probe(Path(name), steps)
    probe, step = (statistics.median(row[key] for row in rows) for key in ("handoff/probe_s", "time/step"))
    figures["probe in the quickstart"] = figure(probe, "s")
    figures["step of the quickstart"] = figure(step, "s")
    figures["probe over step"] = figure(probe / step, "share", at_most=0.01)
    settings = {"shape": SHAPE, "dtype": "bfloat16", "trainer": "TP2", "engines": 2, "bucket bytes": BUCKET_BYTES}
    path = write_result("certificate", figures, {**settings, "handoffs": handoffs, "quickstart steps": steps})
    print(json.dumps(figures, indent=2))
    print(path)


def _by_backend(seconds: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    return {backend: {kind: seconds[f"{backend} {kind}"] for kind in ("with", "without")} for backend in BACKENDS}


if __name__ == "__main__":
    main()
