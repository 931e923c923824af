"""CPU time that an iteration of an engine costs the host, by part, with 64, 256 and 512 requests.

    OMP_NUM_THREADS=1 python lab/benchmarks/decoding.py examples/quickstart/base_model

Times are those of the engine's thread while it makes responses of 48 tokens. ``ours`` is its loop, requests in and
completions out.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout.engine import EngineSettings, VllmEngine
from or1_megatron.rollout.engine_pool import engine_env
from or1_megatron.rollout.engine_thread import EngineThread
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.types import Prompt, Request, Sampling
from or1_verify.types import Problem

SIZES, TOKENS, PROMPT = (64, 256, 512), 48, 24
spent: dict[str, float] = defaultdict(float)


def timed(owner: Any, method: str, part: str) -> None:
    """Add the CPU seconds of a method to ``spent``."""
    inner = getattr(owner, method)

    def call(*arguments: Any, **options: Any) -> Any:
        start = time.thread_time()
        result = inner(*arguments, **options)
        spent[part] += time.thread_time() - start
        return result

    setattr(owner, method, call)


def build(model: Path) -> VllmEngine:
    config = RolloutConfig(kv_cache_bytes=256 << 20, max_concurrent=max(SIZES), placement="separate")
    engine = VllmEngine(EngineSettings(0, model, "float32", PROMPT + TOKENS, config))
    core = engine._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    timed(engine._engine, "step", "vllm")
    timed(runner, "_model_forward", "model")
    timed(runner, "_sample", "sampler")
    for method in ("execute_model", "sample_tokens"):
        timed(core.model_executor, method, "runner")
    for method in ("schedule", "update_from_output"):
        timed(core.scheduler, method, "scheduler")
    return engine


def measure(thread: EngineThread, count: int) -> dict[str, float]:
    """Return microseconds of CPU per iteration, by part."""
    prompt = Prompt(Problem("0", "", "", (), "", {}, "0"), np.arange(5, 5 + PROMPT, dtype=np.int32))
    requests = [Request(prompt, index, Sampling(1.0, 1.0, TOKENS), index) for index in range(count)]
    spent.clear()
    start = thread.call(lambda engine: (time.thread_time(), engine.submit(requests))[0])
    while count:
        count -= len(thread.harvest(60.0).completions)
    whole = thread.call(lambda engine: time.thread_time()) - start
    parts = {name: spent[name] for name in ("model", "sampler", "scheduler")}
    parts["runner, the rest"] = spent["runner"] - spent["model"] - spent["sampler"]
    parts["vLLM's engine, the rest"] = spent["vllm"] - spent["runner"] - spent["scheduler"]
    parts["ours"] = whole - spent["vllm"]
    return {name: seconds / TOKENS * 1e6 for name, seconds in parts.items()}


if __name__ == "__main__":
    os.environ.update(engine_env(RolloutConfig(), (), on_cpu=True))
    heart = Heartbeat(Path(tempfile.mkdtemp()), "engine")
    thread = EngineThread(lambda: build(Path(sys.argv[1])), "engine", heart)
    for count in SIZES:
        found = [measure(thread, count) for _ in range(6)][1:]  # the first one warms up
        for part in found[0]:
            print(f"{count}: {part}: {np.median([one[part] for one in found]):,.0f} us")
