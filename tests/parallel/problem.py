"""One small batch and objective that all parallel tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Batch, Sample

VOCABULARY = 61
TEMPERATURE = 0.8
ENTROPY_COEFFICIENT = 0.3


@dataclass(frozen=True)
class WeightedLogProb:
    """loss = -sum A log p - c sum H: both outputs of the head carry gradient."""

    temperature: float = TEMPERATURE

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        loss = -(log_probs * tokens.advantages).sum() - ENTROPY_COEFFICIENT * entropies.sum()
        return loss, {"log_prob": log_probs.detach().sum()}


def samples() -> list[Sample]:
    """Nine sequences of 6 to 40 tokens; some response tokens are not counted."""
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
