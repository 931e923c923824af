"""Chooses the model shapes, parallel layouts, transports and configurations that checks try. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from or1_megatron.config.schema import Config
from or1_megatron.runtime.versions import ROOT
from or1_megatron.selftest.one_check import CheckedMachine

QUICKSTART: Final = ROOT / "examples" / "quickstart"
DEADLINE_S: Final = 1800.0
"""Limit of every wait of one process for another. A check's own time limit is shorter, and ends all its processes."""
ENGINE_TOKENS: Final = 128
"""Longest sequence, in tokens, of the engines in the checks of handoff and sleep."""


_KEYS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_SIZES: Final = {
    "tiny": (128, 64, 96, 2, 4, 2),
    "small": (1003, 128, 256, 4, 4, 2),  # a vocabulary that no tile and no number of ranks divides
    "small, 8 ways": (5003, 512, 1024, 8, 8, 2),  # every axis of parallelism up to 8
    "0.5B": (151936, 896, 4864, 24, 14, 2),  # Qwen2.5-0.5B
    "1.5B": (151936, 1536, 8960, 28, 12, 2),  # DeepSeek-R1-Distill-Qwen-1.5B
    "3B": (151936, 2048, 11008, 36, 16, 2),  # Qwen2.5-3B
    "7B": (152064, 3584, 18944, 28, 28, 4),  # DeepSeek-R1-Distill-Qwen-7B
}
SHAPES: Final = {name: dict(zip(_KEYS, sizes, strict=True)) for name, sizes in _SIZES.items()}
"""Shapes of random models by name, as keys of an HF config.json. All other keys are the same for all shapes."""
TIED = {"0.5B", "3B"}


def small_shape(cuda: bool) -> str:
    """Return the name of a small model's shape. Every parallel layout that the devices allow can divide this model."""
    return "small, 8 ways" if cuda else "small"


KINDS: Final = ("TP2", "PP2", "TP2 SP", "PP2 VPP2", "CP2", "DP2", "DP2 distopt")
"""One layout per kind of parallelism, each on two devices."""


def layouts_for(cuda: bool, devices: int) -> list[str]:
    """Return the parallel layouts to compare: of one device, of two devices, and combinations on all devices.

    On CPU, to keep within three minutes, a layout is left out if another contains its kind of parallelism.
    """
    if not cuda:
        return ["1", "1 full", "1 one_pass", "TP2 SP", "PP2 VPP2", "CP2", "DP2 distopt overlap"]
    names = ["1", "1 selective", "1 full", "1 one_pass", "1 distopt"]
    if devices > 1:
        names += [*KINDS, "DP2 distopt overlap"]
    return list(dict.fromkeys([*names, *_combinations(devices)] if devices > 2 else names))


def _combinations(devices: int) -> Iterator[str]:
    """Yield each combination of TP, PP, CP and DP that uses all devices, with SP if TP > 1 and distopt if DP > 1. The
    model has 8 heads and 8 layers, so only DP can be 3, 5, 6 or 7."""
    divisors = [n for n in (1, 2, 4, 8) if devices % n == 0]
    for tensor, pipeline, context in itertools.product(divisors, repeat=3):
        data, rest = divmod(devices, tensor * pipeline * context)
        if rest or not data:
            continue
        sizes = (("TP", tensor), ("PP", pipeline), ("CP", context), ("DP", data))
        words = [f"{axis}{size}" for axis, size in sizes if size > 1]
        yield " ".join([*words, *(["SP"] if tensor > 1 else []), *(["distopt"] if data > 1 else [])])


def save_and_load_layouts(devices: int) -> tuple[str, str]:
    """Return (layout that saves, layout that loads). If ``devices`` is odd and above 1, one device stays unused."""
    if devices == 1:
        return "1 distopt", "1"
    data = f" DP{devices // 2}" if devices > 3 else ""
    return f"TP2{data} distopt", f"PP2{data}"


def placements_for(cuda: bool, devices: int) -> dict[str, tuple[int, int, list[str]]]:
    """Return (trainer ranks, engines, transports) by placement: colocated and, on two or more GPUs, also separate."""
    if not cuda:
        return {"colocated": (devices, 1, ["gloo", "shared_memory", "gloo+shared_memory"])}
    placements = {"colocated": (devices, devices, ["nccl+cuda_ipc"] if devices > 1 else ["cuda_ipc"])}
    if devices > 1:
        placements["colocated"][2].append("cuda_ipc")
        placements["separate"] = (devices // 2, devices // 2, ["nccl", "cuda_ipc"])
    return placements


def _tensor_ranks(ranks: int) -> int:
    return 1 if ranks % 2 else 2


def handoff_config(model: Path, placement: str, ranks: int, engines: int, cuda: bool) -> Config:
    """Return a configuration with these trainer ranks and engines. Its data and stages are placeholders."""
    stage = {"name": "none", "steps": 1, "max_response_tokens": ENGINE_TOKENS - 32, "prompts_per_step": 1}
    values: dict[str, Any] = {
        "run": {"dir": str(model.parent / "run")},
        "model": {"hf": str(model), "dtype": "float32"},
        "data": {"train": [{"path": "none"}], "max_prompt_tokens": 32},
        "stages": [{**stage, "prompts_per_update": 1, "group_size": 2}],
        "parallel": {"ranks": ranks, "tensor": _tensor_ranks(ranks), "micro_batch_tokens": 256},
        "rollout": {"engines": engines, "placement": placement, "max_concurrent": 16, "kv_cache_bytes": 64 << 20},
        "handoff": {"timeout_s": DEADLINE_S, "bucket_bytes": 1 << 20},
    }
    if cuda:  # an engine and a trainer rank share a device; most of what the engine takes is its KV cache
        values["rollout"] |= {"gpu_memory_fraction": 0.5, "kv_cache_bytes": 8 << 30}
    return Config.model_validate(values)


def training_run(machine: CheckedMachine, placement: str, run: Path, data: Path) -> tuple[Path, list[str]]:
    """Return (configuration file, overrides) of a short quickstart run: 20 steps on GPUs, 5 steps on a CPU."""
    values: dict[str, Any] = {"run.dir": run, "model.hf": QUICKSTART / "base_model"}
    values |= {"data.train.0.path": data / "train.jsonl", "evaluate.data.0.path": data / "heldout.jsonl"}
    if machine.cuda:
        trainers = machine.devices if placement == "colocated" else machine.devices // 2
        engines = machine.devices - (0 if placement == "colocated" else trainers)
        values |= {"parallel.ranks": trainers, "parallel.tensor": _tensor_ranks(trainers)}
        values |= {"rollout.engines": engines, "rollout.placement": placement}
    file = QUICKSTART / ("selftest_gpu.yaml" if machine.cuda else "selftest.yaml")
    return file, [f"{key}={value}" for key, value in values.items()]
