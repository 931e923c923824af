"""Log-probs of sampled tokens: an engine's against the policy's, both from the same folder, without a handoff.

The engine runs first, in a process of its own that ends before the policy starts: they do not share a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rollout.pool import engine_env
from or1_megatron.selftest.context import CheckFailed, Context
from or1_megatron.selftest.models import add_tokenizer, one_rank, random_qwen2
from or1_megatron.selftest.plans import small_shape
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
        differences = np.abs(
            np.concatenate(policy_log_probs(models[dtype], dtype, sampled))
            - np.concatenate([np.array(each["log_probs"]) for each in sampled])
        )
        kind, bound = _BOUND[dtype]
        short = "fp32" if dtype == "float32" else "bf16"
        context.measure(f"{short}: sampled tokens", int(differences.size))
        found = {"largest": float(differences.max()), "mean": float(differences.mean())}
        context.require(f"{short}: {kind} difference of a token's log-prob", found[kind], "nats", at_most=bound)


def samples(context: Context, models: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Return what an engine of each precision samples: prompts, tokens and their log-probs.

    On CPU the engines run at the same time: most of it is their start.
    """
    module, cuda = "or1_megatron.selftest.checks.log_probs", context.machine.cuda
    environment = {**os.environ, **engine_env(rollout_config(cuda), (), not cuda)}
    outs = {dtype: context.folder / f"{dtype}.json" for dtype in models}
    engines = {}
    for dtype, model in models.items():
        command = [sys.executable, "-P", "-m", module, str(model), dtype, str(outs[dtype])]
        engines[dtype] = subprocess.Popen(command, env=environment)
        if cuda:  # one device has no room for two
            engines[dtype].wait()
    for dtype, engine in engines.items():
        if engine.wait() or not outs[dtype].is_file():
            raise CheckFailed(f"the engine ({dtype}) ended with {engine.returncode}; its messages are in the log")
    return {dtype: json.loads(out.read_text()) for dtype, out in outs.items()}


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
            prompt_ids=np.array(each["prompt"], dtype=np.int32),
            response_ids=np.array(each["tokens"], dtype=np.int32),
            advantage=0.0,
            loss_mask=np.ones(len(each["tokens"]), dtype=np.bool_),
        )
        for each in sampled
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


def main() -> int:
    """Sample with one engine: MODEL DTYPE OUT."""
    from or1_megatron.rollout.engine import EngineSettings, VllmEngine

    model, dtype, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    config = rollout_config(torch.cuda.is_available())
    engine = VllmEngine(EngineSettings(0, model, dtype, _MODEL_TOKENS, config))  # type: ignore[arg-type]
    sent = requests(json.loads((model / "config.json").read_text())["vocab_size"])
    engine.submit(sent)
    prompts = {request.seed: request.prompt.token_ids.tolist() for request in sent}
    found: list[dict[str, Any]] = []
    while engine.pending:
        for each in engine.step():
            told = {"tokens": each.token_ids.tolist(), "log_probs": each.log_probs.tolist()}
            found.append({"prompt": prompts[each.seed], **told})
    out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads need not be waited for
