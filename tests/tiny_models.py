"""A session fixture that makes tiny random models of every family, as HF folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "vocab_size": 61,  # not divisible by two ranks
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
THETA = 500.0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""RoPE scaling that keeps some of a head's 8 frequencies, divides others by the factor, and blends the rest."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_theta": THETA}),
    "qwen3": ("Qwen3", {"rope_theta": THETA, "head_dim": 32, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"rope_theta": THETA, "sliding_window": None, "head_dim": 24}),
    "one_kv_head": (
        "Qwen3",
        {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0},
            "original_max_position_embeddings": 32,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "rope_theta": THETA,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}
"""Tiny models by name: transformers' class prefix, and the config values beside ``SIZES``."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give ``tiny(name, **changes)``, which returns the HF folder of a tiny random model of ``FAMILIES``, made once."""
    made: dict[str, Path] = {}

    def get(name: str, **changes: Any) -> Path:
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            make_tiny(made[key], name, **changes)
        return made[key]

    return get


def make_tiny(folder: Path, name: str, dtype: str = "float32", file_size: str = "5GB", **changes: Any) -> Any:
    """Write and return a random model of ``FAMILIES``; ``changes`` are config values. Embeddings are not tied."""
    import torch
    import transformers

    prefix, own = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, "tie_word_embeddings": False, **own, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(getattr(torch, dtype)).eval()
    for at, parameter in model.named_parameters():
        # norms away from 1 and biases away from 0, so that a misplaced row of a weight shows
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in at else 0.0, std=0.15)
    model.save_pretrained(folder, max_shard_size=file_size)
    return model


@pytest.fixture(scope="session")
def tiny_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="session")
def tied_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2", tie_word_embeddings=True)
