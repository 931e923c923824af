"""Measures the CPU time of an engine's iteration on the host, with 64, 256 and 512 requests, and of an engine's start.

    OMP_NUM_THREADS=1 python lab/benchmarks/decoding.py examples/quickstart/base_model

Times are those of the engine's thread while every request makes 144 tokens. ``ours`` is the time outside of vLLM's
core: per iteration our loop, which takes in the outputs, and per response its submission and completion. The limit for
``ours`` is 3% of the iteration time that the plan predicts for an 8B on one H100 with as many requests. The start is
measured first, by vLLM's methods. Nothing is compiled on a CPU, so a second start takes as long as the first.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from plan_nemo import iteration_ms

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout.engine import EngineSettings, VllmEngine
from or1_megatron.rollout.engine_pool import engine_env
from or1_megatron.rollout.engine_thread import EngineThread
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.types import Prompt, Request, Sampling
from or1_verify.types import Problem

SIZES, TOKENS, PROMPT = (64, 256, 512), 144, 24
STARTING = ("init_device", "load_model", "initialize_from_config", "compile_or_warm_up_model")
spent: dict[str, float] = defaultdict(float)


def timed(owner: Any, method: str, part: str) -> None:
    """Replace a method of ``owner`` by one that also adds its CPU seconds to ``spent[part]``."""
    inner = getattr(owner, method)

    def call(*arguments: Any, **options: Any) -> Any:
        start = time.thread_time()
        result = inner(*arguments, **options)
        spent[part] += time.thread_time() - start
        return result

    setattr(owner, method, call)


def build(model: Path) -> VllmEngine:
    begun = time.thread_time()
    from vllm.v1.worker.cpu_worker import CPUWorker

    spent["imports"] = time.thread_time() - begun
    for method in STARTING:
        timed(CPUWorker, method, method)
    config = RolloutConfig(kv_cache_bytes=256 << 20, max_concurrent=max(SIZES), placement="separate")
    engine = VllmEngine(EngineSettings(0, model, "float32", PROMPT + TOKENS, config))
    spent["start, the rest"] = time.thread_time() - begun - sum(spent.values())
    print(", ".join(f"{part}: {seconds:.2f} s" for part, seconds in spent.items()))
    engine._sampling_params = partial(engine._sampling_params, ignore_eos=True)
    core = engine._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    timed(engine._engine.engine_core, "get_output", "core")
    timed(runner, "_model_forward", "model")
    timed(runner, "_sample", "sampler")
    for method in ("execute_model", "sample_tokens"):
        timed(core.model_executor, method, "runner")
    for method in ("schedule", "update_from_output"):
        timed(core.scheduler, method, "scheduler")
    for method in ("submit", "_completion"):
        timed(engine, method, "responses")
    return engine


def measure(thread: EngineThread, count: int) -> dict[str, float]:
    """Return microseconds of CPU per iteration, by part. The part ``responses`` is per response."""
    prompt = Prompt(Problem("0", "", "", (), "", {}, "0"), np.arange(5, 5 + PROMPT, dtype=np.int32))
    requests = [Request(prompt, index, Sampling(1.0, 1.0, TOKENS), index) for index in range(count)]
    spent.clear()
    start = thread.call(lambda engine: (time.thread_time(), engine.submit(requests))[0])
    left = count
    while left:
        left -= len(thread.harvest(60.0).completions)
    whole = thread.call(lambda engine: time.thread_time()) - start
    parts = {name: spent[name] for name in ("model", "sampler", "scheduler")}
    parts["runner, the rest"] = spent["runner"] - spent["model"] - spent["sampler"]
    parts["core, the rest"] = spent["core"] - spent["runner"] - spent["scheduler"]
    parts["ours, an iteration"] = whole - spent["core"] - spent["responses"]
    found = {name: seconds / TOKENS * 1e6 for name, seconds in parts.items()}
    return found | {"ours, a response": spent["responses"] / count * 1e6}


if __name__ == "__main__":
    os.environ.update(engine_env(RolloutConfig(), (), on_cpu=True))
    heart = Heartbeat(Path(tempfile.mkdtemp()), "engine")
    thread = EngineThread(lambda: build(Path(sys.argv[1])), "engine", heart)
    for count in SIZES:
        found = [measure(thread, count) for _ in range(4)][1:]  # the first one warms up
        for part in found[0]:
            print(f"{count}: {part}: {np.median([one[part] for one in found]):,.0f} us")
        planned_us = 1e3 * iteration_ms("Llama-3.1-8B", 1, count, count * (PROMPT + TOKENS // 2))
        ours = np.median([one["ours, an iteration"] for one in found]) / planned_us
        print(f"{count}: ours, beside {planned_us:,.0f} us of an 8B on one H100: {ours:.1%}")
