"""A single-GPU policy with our own layers against transformers and torch's own AdamW on the same GPU, in fp32 and bf16.

Not proven here: several GPUs, Transformer Engine, NCCL beyond a world of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.rl.batch import pack
from or1_megatron.rl.loss import ClippedPolicyLoss
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Sample

pytestmark = pytest.mark.gpu

OBJECTIVE = ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.3, temperature=0.8, on_policy=False)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"head": "one_pass"},
    {"distributed_optimizer": False},
]


def samples() -> list[Sample]:
    """Sequences of 30 to 900 tokens, advantages of both signs."""
    rng = np.random.default_rng(3)
    made = []
    for tokens in (30, 900, 257, 64, 511, 129, 33, 700):
        ids = rng.integers(0, 5003, tokens, dtype=np.int32)
        engine = rng.normal(-np.log(5003), 0.5, tokens - 10).astype(np.float32)
        made.append(Sample(ids[:10], ids[10:], float(rng.normal()), np.ones(tokens - 10, dtype=np.bool_), engine))
    return made


@pytest.fixture(scope="module")
def expected(small_qwen2: Path) -> Any:
    """The reference by dtype of the weights, computed in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from or1_megatron.parallel.parity import reference

    def numbers(dtype: str) -> Any:
        network = AutoModelForCausalLM.from_pretrained(small_qwen2, dtype=getattr(torch, dtype)).float().cuda()
        parameters = dict(network.named_parameters())
        return reference(lambda ids: network(ids.cuda()).logits, parameters, samples(), OBJECTIVE)

    return {dtype: numbers(dtype) for dtype in ("float32", "bfloat16")}


def difference(model: Path, dtype: Any, mesh: Any, expected: Any, **parallel: Any) -> Any:
    from or1_megatron.parallel.parity import compare, measure

    made = samples()
    batch = pack(made, BatchLayout(data_ranks=1, budget_tokens=1024, alignment=2))
    layout = ParallelConfig(layers="own", micro_batch_tokens=1024, **parallel)
    found = measure(ModelConfig(hf=model, dtype=dtype), layout, mesh, batch, range(len(made)), OBJECTIVE)
    return compare(found, expected[dtype])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_fp32_equals_transformers(variant: dict[str, Any], small_qwen2: Path, gpu_mesh: Any, expected: Any) -> None:
    found = difference(small_qwen2, "float32", gpu_mesh, expected, **variant)
    assert max(found.log_prob, found.entropy, found.loss) <= 1e-5, found
    assert max(found.grad_norm, found.gradient) <= 1e-4, found
    assert found.parameters <= 1e-3, found


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_bf16_near_transformers(variant: dict[str, Any], small_qwen2: Path, gpu_mesh: Any, expected: Any) -> None:
    """Within bf16's rounding of the fp32 reference on the same rounded weights."""
    found = difference(small_qwen2, "bfloat16", gpu_mesh, expected, **variant)
    assert max(found.log_prob, found.entropy) <= 0.25, found
    assert found.loss <= 0.05 and found.grad_norm <= 0.05 and found.gradient <= 0.1, found
