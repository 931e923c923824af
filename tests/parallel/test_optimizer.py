"""Our AdamW against torch's. Its state at other layouts is test_checkpoint's subject; memory is not measured here."""

from __future__ import annotations

import pytest
import torch

from or1_megatron.parallel import optimizer
from or1_megatron.parallel.optimizer import FusedStepAdamW


def test_pieces_make_the_whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in float64: parameters smaller than a piece of 100 numbers, as large, larger, and without numbers."""
    monkeypatch.setattr(optimizer, "_PIECE_NUMBERS", 100)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ours = [torch.nn.Parameter(drawn(*shape)) for shape in [(7,), (10, 10), (13, 31), (0,)]]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    one, other = FusedStepAdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)  # type: ignore[arg-type]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = drawn(*a.shape)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
