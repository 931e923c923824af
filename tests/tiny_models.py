"""A session fixture that makes tiny random models of every family, as HF folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import or1_megatron

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
SIGMOID_MIXTURE = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rope_theta": THETA,
    "use_cache": True,
}
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
LINEAR_ATTENTION = {
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 12,
    "moe_intermediate_size": 40,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
}
PUBLISHED, GPT_OSS = (
    json.loads((Path(or1_megatron.__file__).parent / f"configs/models/{name}/config.json").read_text())
    for name in ("qwen3_next_80b_a3b", "gpt_oss_20b")
)
NEXT = {key: PUBLISHED[key] for key in PUBLISHED.keys() - SIZES.keys() - LINEAR_ATTENTION.keys()} | {
    "mlp_only_layers": [2]
}
"""The published config of Qwen3-Next, except the keys of ``LINEAR_ATTENTION`` and ``SIZES``."""
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
    "glm4_moe": (  # the keys of GLM-4.5's config.json
        "Glm4Moe",
        {
            **SIGMOID_MIXTURE,
            "attention_bias": True,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    ),
    "deepseek_v3": (  # the keys of DeepSeek-V3's config.json but its quantisation
        "DeepseekV3",
        {
            **SIGMOID_MIXTURE,
            "attention_bias": False,
            "ep_size": 1,
            "kv_lora_rank": 28,
            "moe_layer_freq": 1,
            "n_group": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {**YARN, "original_max_position_embeddings": 32},
            "scoring_func": "sigmoid",
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "v_head_dim": 16,
        },
    ),
    "qwen3_5": (  # with the keys of Qwen3.5-27B's text_config
        "Qwen3_5",
        {
            **LINEAR_ATTENTION,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {"mrope_section": [2, 1, 1], "rope_theta": THETA, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {**LINEAR_ATTENTION, "rope_theta": THETA}),
    "qwen3_next": ("Qwen3Next", {**LINEAR_ATTENTION, **NEXT}),
    "gpt_oss": (  # as published, with a window shorter than the sequences
        "GptOss",
        {
            **{key: GPT_OSS[key] for key in GPT_OSS.keys() - SIZES.keys() - {"layer_types"}},
            "eos_token_id": None,
            "head_dim": 16,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "pad_token_id": None,
            "rope_scaling": {**GPT_OSS["rope_scaling"], "original_max_position_embeddings": 32},
            "sliding_window": 6,
        },
    ),
}
"""Tiny models by name: transformers' class prefix, and the config values in addition to ``SIZES``."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function ``tiny(name, **changes)`` that returns the HF folder of a random model of ``FAMILIES``."""
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
    kind = f"{prefix}TextConfig" if hasattr(transformers, f"{prefix}TextConfig") else f"{prefix}Config"
    config = getattr(transformers, kind)(**{**SIZES, "tie_word_embeddings": False, **own, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(getattr(torch, dtype)).eval()
    biases = [(at, bias) for at, bias in model.named_buffers() if at.endswith("correction_bias")]
    for _, bias in biases:
        bias.data = bias.data.float()  # in files of bf16, too
    for at, parameter in (*model.named_parameters(), *biases):
        # norms away from 1 (or, zero-centred, from 0) and biases away from 0, so that a misplaced row of a weight shows
        mean = 1.0 if "norm" in at and ("linear_attn" in at or not hasattr(config, "linear_conv_kernel_dim")) else 0.0
        wide = at.endswith(("gate_up_proj_bias", "sinks"))  # gates beyond the limit of gpt-oss, sinks that matter
        torch.nn.init.normal_(parameter, mean=mean, std=4.0 if wide else 0.15)
    model.save_pretrained(folder, max_shard_size=file_size)
    if "num_nextn_predict_layers" in own:
        add_draft(folder, f"model.layers.{config.num_hidden_layers}.eh_proj.weight")
    elif hasattr(config, "linear_conv_kernel_dim"):
        add_draft(folder, "mtp.fc.weight")
    return model


def add_draft(folder: Path, name: str) -> None:
    """Add a tensor of a draft head to the folder's last file, as published models have it; transformers drops it."""
    import torch
    from safetensors.torch import load_file, save_file

    last, index = max(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    save_file({**load_file(last), name: torch.randn(64, 128)}, last, {"format": "pt"})
    if index.is_file():
        listed = json.loads(index.read_text())
        listed["weight_map"][name] = last.name
        index.write_text(json.dumps(listed))


@pytest.fixture(scope="session")
def tiny_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="session")
def tied_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2", tie_word_embeddings=True)
