"""Gather parts of different sizes over gloo, which supports equal parts only.

Megatron does so among the tensor-parallel ranks that share an expert: each rank contributes the tokens that were
routed to the expert from it. Patched into Megatron where there is no CUDA (``cpu_device``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megatron.core.tensor_parallel.mappings as mappings
import torch
import torch.distributed as dist
from torch import Tensor

_gather_even = mappings._gather_along_first_dim


def _gather(
    mine: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """Gather [t, ...] of each rank, with its own t, end to end on all ranks."""
    if output_split_sizes is None or len(set(output_split_sizes)) == 1:
        gathered: Tensor = _gather_even(mine, group, output_split_sizes, use_global_buffer)
        return gathered
    parts = [mine.new_empty(size, *mine.shape[1:]) for size in output_split_sizes]
    parts[group.rank()] = mine.contiguous()
    for rank, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=rank)
    return torch.cat(parts)


def install() -> None:
    mappings._gather_along_first_dim = _gather
