"""Log-probs of sampled tokens: an engine's against the policy's, both from the same folder, without a handoff.

The engine runs first, in a process of its own that ends before the policy starts: they do not share a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rollout.pool import engine_env
from or1_megatron.selftest.models import add_tokenizer, one_rank, random_qwen2
from or1_megatron.selftest.one_check import CheckFailed, Context
from or1_megatron.selftest.plans import small_shape
from or1_megatron.selftest.process import MODULE, write_task
from or1_megatron.types import Prompt, Request, Sample, Sampling
from or1_verify.types import Message, Problem

_MODEL_TOKENS: Final = 256
_RESPONSES: Final = 16
_BOUND: Final = {"float32": ("largest", 1e-3), "bfloat16": ("mean", 0.05)}
"""In bfloat16 single tokens differ by tenths of a nat without any fault."""


def log_probs(context: Context) -> None:
    models = {}
    for dtype in _BOUND:
        folder = context.folder / dtype
        folder.mkdir()
        models[dtype] = random_qwen2(small_shape(context.machine.cuda), folder, getattr(torch, dtype))
        add_tokenizer(models[dtype])
    for dtype, sampled in samples(context, models).items():
        of_engine = np.concatenate([np.array(response["log_probs"]) for response in sampled])
        differences = np.abs(np.concatenate(policy_log_probs(models[dtype], dtype, sampled)) - of_engine)
        kind, bound = _BOUND[dtype]
        short = "fp32" if dtype == "float32" else "bf16"
        context.measure(f"{short}: sampled tokens", int(differences.size))
        value = float(differences.max() if kind == "largest" else differences.mean())
        context.require(f"{short}: {kind} difference of a token's log-prob", value, "nats", at_most=bound)


def samples(context: Context, models: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Return what an engine of each precision samples: prompts, tokens and their log-probs.

    On CPU the engines run at the same time: most of it is their start.
    """
    function, cuda = "or1_megatron.selftest.checks.log_probs:one_engine", context.machine.cuda
    environment = {**os.environ, **engine_env(rollout_config(cuda), (), not cuda)}
    engines, results = {}, dict[str, str]()
    for dtype, model in models.items():
        todo, results[dtype] = write_task(model.parent, {"model": str(model), "dtype": dtype})
        command = [sys.executable, "-P", "-m", MODULE, function, todo, results[dtype]]
        engines[dtype] = subprocess.Popen(command, env=environment)
        if cuda:  # one device has no room for two
            engines[dtype].wait()
    for dtype, engine in engines.items():
        if engine.wait():
            raise CheckFailed(f"the engine ({dtype}) ended with {engine.returncode}; its messages are in the log")
    return {dtype: json.loads(Path(result).read_text()) for dtype, result in results.items()}


def rollout_config(cuda: bool) -> RolloutConfig:
    # separate: vLLM's sleep mode, and with it its own allocator, is left to the check that needs it
    values: dict[str, Any] = {"placement": "separate", "gpu_memory_fraction": 0.5} if cuda else {}
    return RolloutConfig(max_concurrent=_RESPONSES, kv_cache_bytes=64 << 20, **values)


def policy_log_probs(model: Path, dtype: Any, sampled: list[dict[str, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return the policy's log-prob of each sampled token."""
    from or1_megatron.parallel.policy import MegatronPolicy, WholePolicy

    layout = ParallelConfig(micro_batch_tokens=2 * _MODEL_TOKENS)
    mesh = one_rank()
    policy = MegatronPolicy(ModelConfig(hf=model, dtype=dtype), layout, OptimizerConfig(), mesh)
    samples = [
        Sample(
            prompt_ids=np.array(response["prompt"], dtype=np.int32),
            response_ids=np.array(response["tokens"], dtype=np.int32),
            advantage=0.0,
            loss_mask=np.ones(len(response["tokens"]), dtype=np.bool_),
        )
        for response in sampled
    ]
    batch = pack(samples, BatchLayout(1, 2 * _MODEL_TOKENS, 2))
    return list(WholePolicy(policy).score(batch, 1.0).log_probs)


def requests(vocabulary: int) -> list[Request]:
    """Return requests at temperature 1 with random prompts of several lengths."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(_RESPONSES):
        ids = rng.integers(2, vocabulary, 3 + 5 * index, dtype=np.int32)
        problem = Problem(str(index), "selftest", "math", (Message("user", "?"),), "0", {}, f"selftest:{index}")
        made.append(Request(Prompt(problem, ids), 0, Sampling(1.0, 1.0, 96), index))
    return made


def one_engine(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Sample with one engine; note prompts, tokens and log-probs."""
    from or1_megatron.rollout.engine import EngineSettings, VllmEngine

    model, config = Path(task["model"]), rollout_config(torch.cuda.is_available())
    engine = VllmEngine(EngineSettings(0, model, task["dtype"], _MODEL_TOKENS, config))
    sent = requests(json.loads((model / "config.json").read_text())["vocab_size"])
    engine.submit(sent)
    prompts = {request.seed: request.prompt.token_ids.tolist() for request in sent}
    sampled: list[dict[str, Any]] = []
    while engine.pending:
        for done in engine.step():
            scored = {"tokens": done.token_ids.tolist(), "log_probs": done.log_probs.tolist()}
            sampled.append({"prompt": prompts[done.seed], **scored})
    note(sampled)
