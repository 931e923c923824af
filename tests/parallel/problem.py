"""A small batch, an objective and a policy, which all parallel tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Batch, Sample, UpdateReport

VOCABULARY = 61
TEMPERATURE = 0.8
ENTROPY_COEFFICIENT = 0.3


@dataclass(frozen=True)
class WeightedLogProb:
    """The loss -sum(A * log p) - c * sum(entropy), in which both outputs of the head have a gradient."""

    temperature: float = TEMPERATURE

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        loss = -(log_probs * tokens.advantages).sum() - ENTROPY_COEFFICIENT * entropies.sum()
        return loss, {"log_prob": log_probs.detach().sum()}


def samples() -> list[Sample]:
    """Return nine sequences of 6 to 40 tokens. Some response tokens do not count in the loss."""
    rng = np.random.default_rng(7)
    made = []
    for prompt, response in [(3, 21), (9, 31), (5, 2), (4, 17), (8, 8), (2, 4), (6, 33), (3, 11), (5, 25)]:
        mask = np.ones(response, dtype=np.bool_)
        mask[response // 2] = False
        made.append(
            Sample(
                prompt_ids=rng.integers(0, VOCABULARY, prompt, dtype=np.int32),
                response_ids=rng.integers(0, VOCABULARY, response, dtype=np.int32),
                advantage=float(rng.normal()),
                loss_mask=mask,
            )
        )
    return made


def batch(data_ranks: int, budget_tokens: int) -> Batch:
    return pack(samples(), BatchLayout(data_ranks=data_ranks, budget_tokens=budget_tokens, alignment=8))


def make_policy(model: Path, dtype: Any = "float32", lr: float = 1e-6, **layout: Any) -> MegatronPolicy:
    """Make a policy on the process group that this process has joined, by the keys of ``parallel``."""
    parallel = ParallelConfig(**layout)
    mesh = build_mesh(parallel, seed=1)
    return MegatronPolicy(ModelConfig(hf=model, dtype=dtype), parallel, OptimizerConfig(lr=lr), mesh)


def update(policy: MegatronPolicy, batch: Batch) -> UpdateReport:
    return policy.update(batch.ranks[policy.mesh.data_rank], WeightedLogProb(), batch.token_count)
