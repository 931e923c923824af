"""Inputs of the head, and a run of them through either epilogue in either mode.

``python head_cases.py EPILOGUE IN OUT`` runs the cases of a file that torch has saved: Triton's kernels
can be interpreted on the CPU only in a process that had TRITON_INTERPRET=1 before it imported triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from or1_megatron.kernels.head import VocabularyShard
from or1_megatron.selftest.checks.kernels import HeadCase, HeadNumbers, head_loss, run_head


def random_case(
    tokens: int,
    vocabulary: int,
    *,
    hidden: int = 24,
    padding: int = 0,
    temperature: float = 1.0,
    shift: float = 0.0,
    entropy: bool = True,
    tile: int = 16,
    dtype: torch.dtype = torch.float32,
) -> HeadCase:
    """Return a case whose inputs are multiples of 1/8, so that logits are exact in fp32, even with a ``shift`` of 10^4.

    ``tile``: the budget is for a tile of ``tile`` tokens by ``tile`` rows of the vocabulary.
    """
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    eighths = [
        torch.randint(-10, 11, shape, generator=generator) / 8 for shape in ((tokens, hidden), (vocabulary, hidden))
    ]
    x, weight = eighths
    x[:, 0], weight[:, 0] = shift, 1.0
    padded = torch.cat((weight, torch.full((padding, hidden), 50.0)))
    return HeadCase(
        hidden=x.to(dtype),
        weight=padded.to(dtype),
        targets=torch.randint(vocabulary, (tokens,), generator=generator),
        a=torch.randn(tokens, generator=generator),
        c=torch.randn(tokens, generator=generator) if entropy else None,
        temperature=temperature,
        true_vocab_size=vocabulary,
        budget_bytes=4 * tile * tile,
    )


def in_both_modes(cases: dict[str, HeadCase]) -> dict[str, HeadCase]:
    return {
        f"{name}, {mode}": replace(case, mode=mode)
        for name, case in cases.items()
        for mode in ("recompute", "one_pass")
    }


def forward_and_backward(mode: str, hidden: Tensor, weight: Tensor, targets: Tensor, budget_bytes: int | None) -> None:
    """Run both passes of the loss -sum(log p + 0.1 * entropy). Only the head allocates memory."""

    def pointwise(log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_probs.sum() - 0.1 * entropies.sum(), {}

    given = (hidden, weight, targets, 0.6, VocabularyShard(0, len(weight)))
    head_loss(mode, given, pointwise, budget_bytes=budget_bytes).backward()


def run_interpreted(cases: dict[str, HeadCase], folder: Path) -> dict[str, HeadNumbers]:
    """Compute the cases by Triton's kernels, which another process interprets."""
    torch.save({name: vars(case) for name, case in cases.items()}, folder / "cases.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "triton", str(folder / "cases.pt"), str(folder / "found.pt")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: HeadNumbers(**fields) for name, fields in torch.load(folder / "found.pt").items()}


def main(epilogue: str, cases: str, found: str) -> None:
    torch.set_num_threads(1)
    if epilogue == "triton":
        from or1_megatron.kernels import tiles_triton

        tiles_triton._BLOCK = 16  # several blocks and a tail in rows of a hundred logits
    torch.save(
        {name: run_head(HeadCase(**fields), epilogue)._asdict() for name, fields in torch.load(cases).items()}, found
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
