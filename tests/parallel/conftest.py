from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("tiny_qwen2"), tied=False)


@pytest.fixture(scope="session")
def tied_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("tied_qwen2"), tied=True)


def make_tiny_qwen2(folder: Path, tied: bool) -> Path:
    """A random Qwen2: 4 layers, grouped queries, biases, a vocabulary (61) that two ranks cannot share evenly."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=500.0,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        # norms away from 1 and biases away from 0, so that a row in the wrong place shows
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    model.save_pretrained(folder)
    return folder
