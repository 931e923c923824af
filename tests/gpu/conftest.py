"""One rank on the GPU for all tests here. Modules that import megatron are imported late: without CUDA they would alter
the process of every other test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def gpu_mesh() -> Iterator[Any]:
    from gpu_models import one_rank

    from or1_megatron.parallel.mesh import stop_process_group

    yield one_rank()
    stop_process_group()


@pytest.fixture(scope="session")
def small_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp32 Qwen2: 4 layers, head size 64, a vocabulary that no tile divides."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("small_qwen2")
    config = Qwen2Config(
        vocab_size=5003,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.06)
    model.save_pretrained(folder)
    return folder
