"""Computes the fused head tile by tile: GEMMs of a library, and elementwise work (the epilogue) in Triton or torch.

Shapes: T tokens, t tokens of one tile, H hidden, V/tp rows of the output weight on this rank, v rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from or1_megatron.kernels.head_weight_gradient import WeightGradient, add_product
from or1_megatron.kernels.statistics import Scores, VocabularyShard, merge
from or1_megatron.kernels.tile_sizes import AllocationPlan, Mode, aligned, allocation_plan
from or1_megatron.kernels.tiles_torch import TorchEpilogue

if TYPE_CHECKING:
    from or1_megatron.kernels.tiles_triton import TritonEpilogue

Epilogue = Literal["auto", "triton", "torch"]


@dataclass(frozen=True)
class HeadSettings:
    """The arguments of a call of the head that are not tensors (``head.log_probs_and_entropies`` explains them)."""

    temperature: float
    shard: VocabularyShard
    epilogue: Epilogue
    budget_bytes: int | None


def with_triton(epilogue: Epilogue, device: torch.device) -> bool:
    """Return whether to use Triton's kernels; "auto" uses them if the device is a GPU and Triton is installed."""
    if epilogue == "auto":
        return device.type == "cuda" and find_spec("triton") is not None
    return epilogue == "triton"


class TiledHead:
    """One call of the head: its inputs and buffers, and the work on each tile."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, settings: HeadSettings, mode: Mode) -> None:
        _check(hidden, weight, targets)
        self._hidden, self._targets = hidden, targets
        self._temperature, self._shard = settings.temperature, settings.shard
        self._weight = weight[: settings.shard.real_rows(len(weight))]
        triton = with_triton(settings.epilogue, hidden.device)
        self.plan: AllocationPlan = allocation_plan(
            hidden.shape[0],
            hidden.shape[1],
            len(self._weight),
            hidden.dtype,
            mode,
            device_type=hidden.device.type,
            scratch=not triton,
            ranks=settings.shard.ranks,
            budget_bytes=settings.budget_bytes,
        )
        plan = self.plan
        self._logits = self._buffer(plan.blocks, plan.tile_tokens * aligned(plan.block_rows))
        self._cast = self._buffer(plan.cast_numbers)
        # A tile's hidden gradient is summed in fp32: in this buffer, or in place where the gradient is fp32 itself.
        self._hidden_sum = self._buffer(plan.accumulator_bytes // 4)
        self._epilogue: TorchEpilogue | TritonEpilogue
        if triton:
            from or1_megatron.kernels.tiles_triton import TritonEpilogue

            self._epilogue = TritonEpilogue()
        else:
            self._epilogue = TorchEpilogue(self._buffer(plan.scratch_numbers))

    def tiles(self) -> Iterator[slice]:
        """Yield the slice of tokens of each tile; one empty slice if there are no tokens."""
        tokens = len(self._hidden)
        for start in range(0, max(tokens, 1), self.plan.tile_tokens):
            yield slice(start, min(start + self.plan.tile_tokens, tokens))

    def statistics(self, part: slice) -> tuple[Tensor, list[Tensor | None]]:
        """Return (a tile's statistics [4, t] over this rank's vocabulary, the epilogue's result for each block)."""
        blocks = self._blocks()
        of_blocks = self._buffer(len(blocks), 4, part.stop - part.start)
        offsets = []
        for index, rows in enumerate(blocks):
            logits = self._compute_logits(part, rows, index)
            offsets.append(self._epilogue.statistics(logits, self._columns(part, rows), of_blocks[index]))
        return merge(of_blocks), offsets

    def gradients(
        self,
        part: slice,
        offsets: list[Tensor | None] | None,
        scores: Scores,
        of_log_probs: Tensor,
        of_entropies: Tensor | None,
        grad_hidden: Tensor | None,
        grad_weight: WeightGradient | None,
    ) -> None:
        """Write a tile's rows of ``grad_hidden`` [T, H], and add the tile's part of the gradient to ``grad_weight``.

        ``offsets``: from ``statistics``, if the tile's logits are still in memory; None: compute the logits again.
        ``scores``, ``of_log_probs`` and ``of_entropies`` are the tile's, [t].
        """
        of_log_probs = of_log_probs / self._temperature
        of_entropies = None if of_entropies is None else of_entropies / self._temperature
        hidden_sum = self._sum_for(part, grad_hidden)
        for index, rows in enumerate(self._blocks()):
            if offsets is None:
                logits, offset = self._compute_logits(part, rows, index), None
            else:
                logits, offset = self._logits_view(part, rows, index), offsets[index]
            gradient = self._epilogue.gradient(
                logits,
                self._columns(part, rows),
                offset,
                scores,
                of_log_probs,
                of_entropies,
                self._product_dtype,
            )
            if hidden_sum is not None:
                add_product(hidden_sum, gradient, self._block_of_weight(rows))
            if grad_weight is not None:
                add_product(grad_weight.sum[rows], gradient.t(), self._tile_of_hidden(part))
        if grad_hidden is not None and hidden_sum is not None:
            grad_hidden[part] = hidden_sum

    @property
    def _product_dtype(self) -> torch.dtype:
        """The dtype of all GEMMs' inputs: fp32 on CPU, which has no GEMM of bf16 inputs with an fp32 result."""
        return self._hidden.dtype if self._hidden.device.type == "cuda" else torch.float32

    def _buffer(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._hidden.device)

    def _blocks(self) -> list[slice]:
        rows, step = len(self._weight), self.plan.block_rows
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _columns(self, part: slice, rows: slice) -> Tensor:
        return self._targets[part] - (self._shard.first_row + rows.start)

    def _logits_view(self, part: slice, rows: slice, index: int) -> Tensor:
        """Return a view [t, v] of the buffer for block ``index``'s logits (in recompute there is one buffer)."""
        tokens, columns = part.stop - part.start, rows.stop - rows.start
        buffer = self._logits[index % self.plan.blocks]
        return buffer[: tokens * aligned(columns)].view(tokens, aligned(columns))[:, :columns]

    def _compute_logits(self, part: slice, rows: slice, index: int) -> Tensor:
        """Compute and return a block's logits [t, v] in fp32, divided by the temperature."""
        logits = self._logits_view(part, rows, index)
        factors = self._tile_of_hidden(part), self._block_of_weight(rows).t()
        add_product(logits, *factors, keep=0.0, factor=1.0 / self._temperature)
        return logits

    def _tile_of_hidden(self, part: slice) -> Tensor:
        return self._as_factor(self._hidden[part], 0)

    def _block_of_weight(self, rows: slice) -> Tensor:
        return self._as_factor(self._weight[rows], self.plan.tile_tokens * self._weight.shape[1])

    def _as_factor(self, values: Tensor, start: int) -> Tensor:
        """Return values in the dtype of GEMM inputs. A cast copy lies in the cast buffer from ``start`` on."""
        if values.dtype == self._product_dtype:
            return values
        return self._cast[start : start + values.numel()].view(values.shape).copy_(values)

    def _sum_for(self, part: slice, grad_hidden: Tensor | None) -> Tensor | None:
        """Return zeros [t, H] in fp32, to which the tile's hidden gradient is added; None without ``grad_hidden``."""
        if grad_hidden is None:
            return None
        tile = grad_hidden[part]
        if tile.dtype == torch.float32:
            return tile.zero_()
        return self._hidden_sum[: tile.numel()].view(tile.shape).zero_()


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    allowed = (torch.float32, torch.bfloat16, torch.float16)
    if hidden.dtype not in allowed or weight.dtype != hidden.dtype:
        raise TypeError(
            f"head: hidden is {hidden.dtype} and weight {weight.dtype}; both must be the same of "
            + ", ".join(str(dtype) for dtype in allowed)
        )
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"head: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit; expected [T, H], [V/tp, H] and [T]"
        )
