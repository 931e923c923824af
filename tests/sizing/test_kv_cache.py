"""The KV cache of engines that share GPUs with the trainer, against figures worked by hand.

Not proven: the two reserves, which only a GPU can confirm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from or1_megatron.config.schema import Config
from or1_megatron.sizing.conflicts import conflicts, kv_tokens
from or1_megatron.sizing.kv_cache import shared_kv_cache_bytes
from or1_megatron.trainer import sampling
from or1_megatron.weights.shape import Shape

# DeepSeek-R1-Distill-Qwen-7B's config.json.
QWEN_7B = {
    "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = Shape.of(QWEN_7B)
WEIGHTS = 7_615_487_488  # the published count less 129,024 biases
LOGITS = 3 * 4 * 128 * 152_064
RESERVES = 14 * 1024**3  # 8 GiB of the trainer, 6 GiB of the engine


def config(gpu_gb: float | None = 80, **sections: Any) -> Config:
    """Rows and sequences of 36,864 tokens on 32 GPUs of 80e9 bytes, 128 responses at once in each engine."""
    return Config.model_validate(
        {
            "run": {"dir": "runs/x"},
            "model": {"hf": "m"},
            "data": {"train": [{"path": "a.jsonl"}]},
            "stages": [
                {"name": "1", "steps": 1, "max_response_tokens": 32768, "prompts_per_step": 256,
                 "prompts_per_update": 256, "group_size": 16},
            ],
            "parallel": {"ranks": 32, "micro_batch_tokens": 36_864, **sections.get("parallel", {})},
            "rollout": {"engines": 4, "max_concurrent": 128, **sections.get("rollout", {})},
            "cluster": {"gpu_memory_gb": gpu_gb},
        }
    )  # fmt: skip


def too_small(config: Config) -> list[str]:
    return [line for line in conflicts(config, SHAPE, None, "cuda") if "has room for" in line]


def test_what_is_left_of_a_gpu() -> None:
    """80e9 - 2 * 7,615,487,488 - 12 * 128 * 152,064 - 14 GiB = 49,503,069,184 bytes; 57,344 bytes a token."""
    left = 80_000_000_000 - 2 * WEIGHTS - LOGITS - RESERVES
    assert shared_kv_cache_bytes(config(), SHAPE) == left == 49_503_069_184
    assert kv_tokens(config(), SHAPE) == 863_265
    half = 80_000_000_000 - WEIGHTS - LOGITS - RESERVES
    assert shared_kv_cache_bytes(config(rollout={"tensor_parallel": 2}), SHAPE) == half


@pytest.mark.parametrize(
    "other",
    [
        config(gpu_gb=None),
        config(rollout={"placement": "separate"}),
        config(parallel={"offload": "never"}),
    ],
    ids=["unknown GPU", "separate", "trainer stays"],
)
def test_left_to_vllm(other: Config) -> None:
    assert shared_kv_cache_bytes(other, SHAPE) is None


def test_a_gpu_that_is_too_small_is_refused() -> None:
    """A GPU of 31e9 bytes has 503,069,184 left, 8,772 tokens: fewer than one sequence of 34,816."""
    (line,) = too_small(config(gpu_gb=31))
    assert "31 GB" in line and "8,772" in line and "raise rollout.tensor_parallel" in line
    assert too_small(config()) == []


def test_engines_start_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nobody takes turns; with one its memory counts, unless the config says another."""
    monkeypatch.setattr(sampling, "read_hf_config", lambda folder: QWEN_7B)
    unknown = config(gpu_gb=None)
    assert sampling.sized_rollout(unknown) == unknown.rollout
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("Card", (), {"total_memory": 90_000_000_000})
    )
    assert sampling.sized_rollout(unknown).kv_cache_bytes == 59_503_069_184
    assert sampling.sized_rollout(config()).kv_cache_bytes == 49_503_069_184
    assert sampling.sized_rollout(config(rollout={"kv_cache_bytes": 7})).kv_cache_bytes == 7
