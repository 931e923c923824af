"""Plans the fused head's buffers: chooses tile sizes from a budget in bytes.

Shapes: T tokens, t tokens of one tile, H hidden, V/tp rows of the output weight on this rank, v rows of one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["recompute", "one_pass"]

BUDGET_BYTES: Mapping[tuple[str, Mode], int] = {
    # Gradients are summed per tile in fp32, so their memory traffic is inversely proportional to the tile's sides.
    # So tiles are large, and nearly square in recompute, which can cut both axes. By arithmetic, one pass with half of
    # these bytes takes 11% longer on an H100.
    ("cuda", "recompute"): 345_000_000,
    ("cuda", "one_pass"): 2_560_000_000,
    # Tiles of 1,024 x 1,024, 1 MiB at a time: larger and smaller ones were slower (benchmarks/head_cpu.py at d9f6202).
    # One pass needs whole rows of logits: 128 MiB of them, and as much scratch.
    ("cpu", "recompute"): 5 << 20,
    ("cpu", "one_pass"): 129 << 20,
}
_CPU_BLOCK_ROWS = 512
_CUDA_SCRATCH_BYTES = 32 << 20
_ALIGNMENT = 64
"""Rows of logits start at multiples of this many numbers, because GEMMs are faster with aligned leading dimensions."""
_VECTORS = 24
"""Largest number of [T] fp32 vectors in memory at once: statistics, scores, coefficients and temporaries."""


def aligned(rows: int) -> int:
    """Return the length in memory of a row of ``rows`` logits: ``rows`` rounded up to the alignment."""
    return -(-rows // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class AllocationPlan:
    """Sizes of the buffers of one call of the head; each buffer is allocated once."""

    tile_tokens: int
    """t: tokens of one tile."""
    block_rows: int
    """v: rows of the output weight in one GEMM."""
    blocks: int
    """Number of blocks of logits in memory at once: one in recompute, all of this rank's vocabulary in one_pass."""
    scratch_numbers: int
    """Size of the torch epilogue's scratch memory, in fp32 numbers; 0 for the Triton epilogue, which needs none."""
    cast_numbers: int
    """Size in numbers of the buffer for fp32 copies of a hidden tile and a weight block; 0 unless on CPU in bf16."""
    vector_bytes: int
    """Largest number of bytes of all per-token vectors together, and of one tile's statistics in all blocks."""
    accumulator_bytes: int
    """Bytes of the fp32 sum of a tile's hidden gradient; 0 if the gradient itself is fp32. ``workspace_bytes`` counts
    neither this sum nor the weight's fp32 gradient (Megatron's main_grad, or V/tp * H * 4 bytes)."""

    @property
    def logits_numbers(self) -> int:
        return self.tile_tokens * self.blocks * aligned(self.block_rows)

    @property
    def workspace_bytes(self) -> int:
        """Bytes allocated for all buffers except outputs and accumulators."""
        return 4 * (self.logits_numbers + self.scratch_numbers + self.cast_numbers) + self.vector_bytes


def allocation_plan(
    tokens: int,
    hidden: int,
    vocab_local: int,
    dtype: torch.dtype,
    mode: Mode,
    *,
    device_type: str = "cuda",
    scratch: bool = False,
    ranks: int = 1,
    budget_bytes: int | None = None,
) -> AllocationPlan:
    """Return the sizes of the head's buffers for ``tokens`` tokens and ``vocab_local`` rows of the output weight.

    Args:
        dtype: dtype of hidden and weight.
        scratch: whether the epilogue needs scratch (torch's does, Triton's does not).
        ranks: number of ranks that share the vocabulary.
        budget_bytes: most bytes of logits and scratch; None: the default of device and mode.

    Example: 32,768 tokens, H 5,120, V 152,064, bf16 on CUDA. With recompute a tile has 8,192 tokens by 10,176 rows, 333
    MB of logits; with one_pass 4,096 tokens by all rows, 2,491 MB.
    """
    on_cuda = device_type == "cuda"
    budget = budget_bytes or BUDGET_BYTES["cuda" if on_cuda else "cpu", mode]
    tokens, rows = max(tokens, 1), max(vocab_local, 1)
    scratch_limit = _CUDA_SCRATCH_BYTES if on_cuda else 4 * _CPU_BLOCK_ROWS**2
    numbers = max((budget - (min(scratch_limit, budget // 2) if scratch else 0)) // 4, _ALIGNMENT)
    if mode == "recompute":
        tile_tokens, block_rows = _square(tokens, rows, numbers)
        blocks = 1
    else:
        block_rows = rows if on_cuda else min(rows, _CPU_BLOCK_ROWS)
        blocks = -(-rows // block_rows)
        tile_tokens = _even(numbers // (blocks * aligned(block_rows)), tokens)
    widest = aligned(block_rows)
    cast = dtype != torch.float32 and not on_cuda
    return AllocationPlan(
        tile_tokens=tile_tokens,
        block_rows=block_rows,
        blocks=blocks,
        scratch_numbers=max(min(scratch_limit // 4, tile_tokens * widest), widest) if scratch else 0,
        cast_numbers=(tile_tokens + block_rows) * hidden if cast else 0,
        vector_bytes=4 * ((_VECTORS + 4 * ranks) * tokens + 8 * -(-rows // block_rows) * tile_tokens),
        accumulator_bytes=4 * tile_tokens * hidden if dtype != torch.float32 else 0,
    )


def _square(tokens: int, rows: int, numbers: int) -> tuple[int, int]:
    """Return the tile (t, v), as square as ``tokens`` and ``rows`` allow, with t * aligned(v) <= ``numbers``."""
    tile_tokens = _even(math.isqrt(numbers), tokens)
    block_rows = _even(max(numbers // tile_tokens // _ALIGNMENT, 1) * _ALIGNMENT, rows)
    return _even(numbers // aligned(block_rows), tokens), block_rows


def _even(limit: int, whole: int) -> int:
    """Cut ``whole`` into as few equal pieces of at most ``limit`` as possible; return the size of a piece."""
    limit = max(limit, 1)
    even = -(-whole // -(-whole // limit))
    return min(aligned(even) if aligned(even) <= limit else even, whole)
