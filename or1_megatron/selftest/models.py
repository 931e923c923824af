"""Makes random Qwen2 models of a given shape, policies that start from them, and random batches, for the self-test.

Megatron is imported only to make a policy, because processes without it start in half the time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.rl.batch import pack
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.selftest.setups import SHAPES, TIED
from or1_megatron.types import Batch, Sample

if TYPE_CHECKING:
    from or1_megatron.parallel.mesh import Mesh
    from or1_megatron.parallel.policy import MegatronPolicy

OBJECTIVE = ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.01, temperature=1.0, on_policy=True)


def random_qwen2(shape: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Return the HF folder of a random model of a shape in ``SHAPES``; make the folder if it is missing. The weights of
    a small model have the magnitude of trained weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    target = folder / shape.replace(", ", "_").replace(" ", "_")
    if (target / "config.json").is_file():
        return target
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = Qwen2Config(**SHAPES[shape], max_position_embeddings=131072, tie_word_embeddings=shape in TIED)
        model = Qwen2ForCausalLM(config).to(dtype)
    if shape.startswith("small"):
        for name, parameter in model.named_parameters():
            # norms away from 1 and biases away from 0, so that a misplaced row of a weight shows
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.06)
    model.save_pretrained(target)
    return target


def add_tokenizer(model: Path) -> None:
    """Add a tokenizer with a word for each token to a random model's folder, because engines need one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    count = json.loads((model / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{index} ": index for index in range(count)}, unk_token="w0 "))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0 ", eos_token="w1 ").save_pretrained(model)


def one_rank() -> Mesh:
    """Start a process group of this process alone (NCCL on a GPU), as under torchrun, and return its mesh."""
    from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron needs it for its overlaps
    start_process_group(300, SubWorld(1, torch.distributed.HashStore(), "one rank"))
    return build_mesh(ParallelConfig(), seed=1)


def make_policy(hf: Path, mesh: Mesh, **parallel: Any) -> MegatronPolicy:
    """Return a bf16 policy with our own layers, and fp32 master weights in the distributed optimizer."""
    from or1_megatron.parallel.policy import MegatronPolicy

    return MegatronPolicy(
        ModelConfig(hf=hf, dtype="bfloat16"), ParallelConfig(layers="own", **parallel), OptimizerConfig(), mesh
    )


def batch_of(lengths: list[int], row_tokens: int, vocabulary: int) -> Batch:
    """Pack random sequences of these lengths into rows for one rank. An eighth of each sequence is its prompt."""
    return pack(samples_of(lengths, vocabulary), BatchLayout(1, row_tokens, 2))


def samples_of(lengths: list[int], vocabulary: int) -> list[Sample]:
    """Return random samples of these lengths in tokens. An eighth of each sample is its prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for length in lengths:
        ids = rng.integers(0, vocabulary, length, dtype=np.int32)
        prompt = max(1, length // 8)
        zeros, ones = np.zeros(length - prompt, dtype=np.float32), np.ones(length - prompt, dtype=np.bool_)
        samples.append(Sample(ids[:prompt], ids[prompt:], float(rng.normal()), ones, zeros))
    return samples
