"""The whole way from hidden states through the head into the clipped objective with each of its switches, against
float64 autograd on the whole matrix of logits, in both modes and in tiles.

Not proven here: the objectives' formulas (tests/rl/test_objectives.py holds them against plain Python).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_cases import random_case

from or1_megatron.interfaces import TokenInputs
from or1_megatron.kernels.head import (
    VocabularyShard,
    log_probs_and_entropies,
    one_pass_loss,
    reference_log_probs_and_entropies,
)
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss

TOKENS, VOCABULARY = 41, 90
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dual clip, KL, truncated": {"dual_clip": 1.3, "kl_coefficient": 0.2, "correction": "truncated"},
    "masked": {"correction": "masked", "correction_cap": 1.2},
    "on policy, KL, masked": {"on_policy": True, "kl_coefficient": 0.2, "correction": "masked", "correction_cap": 1.2},
}


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_float64(name: str, mode: str) -> None:
    options = {"entropy_coefficient": 0.1, "temperature": 0.7, "on_policy": False, **OBJECTIVES[name]}
    objective = ClippedPolicyLoss(clip_low=0.2, clip_high=0.28, **options)
    case = random_case(TOKENS, VOCABULARY, padding=6)
    generator = torch.Generator().manual_seed(4)
    wide = [tensor.double().requires_grad_() for tensor in (case.hidden, case.weight)]
    scored = reference_log_probs_and_entropies(wide[0], wide[1][:VOCABULARY], case.targets, 0.7)
    near = [scored[0].detach() + torch.randn(TOKENS, generator=generator) * 0.3 for _ in range(3)]
    rest = torch.randn(TOKENS, generator=generator), torch.rand(TOKENS, generator=generator) + 0.5
    # What the narrow side is told is exact on the wide one too.
    inputs = TokenInputs(rest[0], near[0].float(), near[1].float(), near[2].float(), rest[1])
    exact = TokenInputs(
        *(value.double() for field in TokenInputs.__slots__ if (value := getattr(inputs, field)) is not None)
    )
    expected, expected_sums = objective(*scored, exact)
    expected.backward()

    x, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    arguments: Any = (x, w, case.targets, 0.7, VocabularyShard(0, VOCABULARY))
    tiles: Any = {"epilogue": "torch", "budget_bytes": 4 * 16 * 16}
    if mode == "one_pass":
        loss, sums = one_pass_loss(*arguments, lambda p, h, part: objective(p, h, inputs[part]), **tiles)
    else:
        loss, sums = objective(*log_probs_and_entropies(*arguments, **tiles), inputs)
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {name: float(value) for name, value in expected_sums.items()}, rel=1e-4, abs=1e-4
    )
    for found, of_wide in ((x.grad, wide[0].grad), (w.grad, wide[1].grad)):
        assert found is not None and of_wide is not None
        assert float((found - of_wide).norm() / of_wide.norm()) <= 1e-5
