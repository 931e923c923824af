"""A decoding iteration of one engine with 256 requests of a tiny model: by turns with a checkout of another commit.

    git worktree add /tmp/before 5408816
    python benchmarks/decoding.py --before /tmp/before --turns 4

The quickstart's base model of 0.8M parameters samples 1,024 responses of at most 56 tokens at a time, on one thread;
counted are iterations that begin and end with 256 requests. Both commits run with this environment's packages, and
their responses are compared to the bit. Parts are medians of the milliseconds of an iteration inside the functions of
vLLM in ``PARTS``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from result import ROOT, figure, write_result

REQUESTS, BATCH, TOKENS, ROLL_OUTS = 1024, 256, 56, 4
MODEL = ROOT / "examples" / "quickstart" / "base_model"
PARTS = {
    "vLLM's scheduler before it": ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    "vLLM's scheduler after it": ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    "vLLM's model runner, inputs and model": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"),
    "of that, the model": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._model_forward"),
    "vLLM's model runner, sampling": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens"),
    "of that, the sampler": ("vllm.v1.sample.sampler", "Sampler.forward"),
    "vLLM's outputs": ("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs"),
}


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


def worker(out: Path) -> None:
    from or1_megatron.config.schema import RolloutConfig
    from or1_megatron.rollout.pool import engine_env

    rollout = RolloutConfig(engines=1, max_concurrent=BATCH, kv_cache_bytes=64 << 20)
    os.environ.update(engine_env(rollout, (), on_cpu=True))
    import numpy as np
    import torch

    from or1_megatron.rollout.engine import EngineSettings, VllmEngine
    from or1_megatron.rollout.request_plan import plan_requests
    from or1_megatron.types import Prompt, Sampling
    from or1_verify.types import Problem

    torch.set_num_threads(1)
    engine: Any = VllmEngine(EngineSettings(0, MODEL, "float32", 128, rollout))
    prompts = []
    for index, (a, b, c) in enumerate(np.random.default_rng(0).integers(1, 99, (REQUESTS // 8, 3))):
        ids = engine._tokenizer.encode(f"{a}+{b}*{c}=")
        problem = Problem(f"p{index}", "benchmark", "math", (), "0", {}, f"benchmark:{index}")
        prompts.append(Prompt(problem, np.array(ids, dtype=np.int32)))
    running, seconds, digest = engine._engine.engine_core.engine_core.scheduler, timed(PARTS), hashlib.sha256()
    iterations = []
    for number in range(ROLL_OUTS):
        engine.submit(list(plan_requests(prompts, 8, Sampling(1.0, 1.0, TOKENS), number).values()))
        done = []
        while engine.pending:
            before = len(running.running)
            seconds.clear()
            began = time.perf_counter()
            done += engine.step()
            whole = {"an iteration": time.perf_counter() - began, **seconds}
            if number and before == len(running.running) == BATCH:  # the first rollout warms up
                iterations.append(whole)
        for each in sorted(done, key=lambda completion: completion.seed):
            digest.update(each.token_ids.tobytes() + each.log_probs.tobytes() + each.text.encode())
    out.write_text(json.dumps({"iterations": iterations, "digest": digest.hexdigest()}))


def turn(tree: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        command = [sys.executable, __file__, "worker", str(out)]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{tree}: exit status {done.returncode}\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    trees = [arguments.before.resolve(), ROOT]
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    digests, ratios = set(), []
    for number in range(arguments.turns):
        last = {}
        for tree in trees if number % 2 == 0 else trees[::-1]:
            made = turn(tree)
            found[tree] += made["iterations"]
            digests.add(made["digest"])
            last[tree] = statistics.median(each["an iteration"] for each in made["iterations"])
            print(f"turn {number + 1}, {tree.name}: {1e3 * last[tree]:.2f} ms", flush=True)
        ratios.append(last[ROOT] / last[trees[0]])
    figures: dict[str, Any] = {}
    for part in ("an iteration", *PARTS):
        for tree, who in ((ROOT, "this tree"), (trees[0], "the other")):
            value = 1e3 * statistics.median(each.get(part, 0.0) for each in found[tree])
            figures[f"{part}: {who}"] = figure(value, "ms")
    figures["this tree / the other, median of the turns: this tree"] = figure(statistics.median(ratios), at_most=1.0)
    figures["the same responses to the bit: this tree"] = figure(len(digests) == 1)
    asked = ["git", "rev-parse", "--short", "HEAD"]
    other = subprocess.run(asked, cwd=trees[0], capture_output=True, text=True).stdout.strip()
    settings = {"other commit": other, "turns": arguments.turns, "ratios": [round(each, 4) for each in ratios]}
    path = write_result("decoding", figures, {**settings, "requests": BATCH, "response tokens": TOKENS})
    print(json.dumps(figures, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
