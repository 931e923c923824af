from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import rank_server  # noqa: F401

MakeModel = Callable[..., Path]

_TYPES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    return _make_model


def _make_model(folder: Path, architecture: str, dtype: str = "bfloat16", tied: bool = False, **more: Any) -> Path:
    """Make a random model of a family in about three files, with the files beside weights: 4 layers, grouped queries, a
    vocabulary (61) that two ranks cannot share evenly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(
        _TYPES[architecture],
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        **({"sliding_window": None} if architecture.startswith("Mistral") else {}),
        **(mixture if "Moe" in architecture else {}),
        **more,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        # norms away from 1 and biases away from 0, so that a row in the wrong place shows
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    model.save_pretrained(folder, max_shard_size="150KB")
    (folder / "tokenizer.json").write_text(json.dumps({"of": architecture}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "README.md").write_text("The base model's own card.")
    return folder
