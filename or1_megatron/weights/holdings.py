"""Computes which trainer rank holds which part of which HF tensor, by running the table's functions on row numbers.

Layout operations and cuts move whole rows (axis 0) or take a range of columns (axis 1), and leave other axes as they
are. So this module applies them to row numbers instead of tensors, and sees where each row goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from or1_megatron.weights.slicing import Cut, cut
from or1_megatron.weights.table import Row

Box = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: (start, stop) for each axis."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of an HF tensor, and its place in a rank's shard of the Megatron tensor."""

    name: str
    box: Box
    place: Box


@dataclass(frozen=True, slots=True)
class Holding:
    """A rectangle of an HF tensor and the trainer ranks that hold it."""

    name: str
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Trainer ranks as Megatron numbers them: tensor rank changes fastest, then replica (context, data), then stage.

    Experts are spread over the replicas: replica i has expert rank i modulo ``expert``.
    """

    tensor: int
    replicas: int
    pipeline: int
    expert: int = 1

    def ranks(self, stage: int, tensor_rank: int, expert_rank: int | None = None) -> range:
        """Return all ranks that hold one shard; if it is an expert's shard, the ranks with this ``expert_rank``."""
        first = tensor_rank + self.tensor * self.replicas * stage
        stop = first + self.tensor * self.replicas
        if expert_rank is None:
            return range(first, stop, self.tensor)
        return range(first + expert_rank * self.tensor, stop, self.tensor * self.expert)


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


@lru_cache  # layers and experts are alike
def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the part that two rectangles of one tensor share; None if there is none."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` without ``hole``, which lies inside it, as rectangles that do not overlap."""
    rest: list[Box] = []
    for axis, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        outside = [part for part in ((start, low), (high, stop)) if part[0] < part[1]]
        rest += [(*hole[:axis], part, *box[axis + 1 :]) for part in outside]
    return rest


def pieces(row: Row, hf: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rank: int, size: int) -> list[Piece]:
    """Return the pieces of a row's HF tensors on tensor-parallel rank ``rank`` of ``size``, in the shard's order.

    ``shapes`` are the HF tensors' shapes, by name.

    Raises:
        ValueError: the row cannot be cut into ``size`` parts.
    """
    labels, owners, first = [], [], 1  # 0 marks padding rows of a cut
    for name in row.hf:
        rows = shapes[name][0]
        labels.append(torch.arange(first, first + rows)[:, None])
        owners.append((first, name))
        first += rows
    fused = row.layout.fuse(labels, hf)  # [rows of the Megatron tensor, 1]
    if not torch.equal(fused.sort(0).values, torch.cat(labels)):
        raise NotImplementedError(f"{row.megatron}: its layout {row.layout} does more than move rows")
    rest = whole(shapes[row.hf[0]][1:])
    place_rest = rest
    if row.cut is Cut.ROW:
        columns = cut(torch.arange(shapes[row.hf[0]][1])[None], row.cut, rank, size)[0]
        rest = ((int(columns[0]), int(columns[-1]) + 1), *rest[1:])
        place_rest = whole((len(columns), *shapes[row.hf[0]][2:]))
    else:
        fused = cut(fused, row.cut, rank, size)
    held = []
    for place, label, length in _runs(fused[:, 0], {start for start, _ in owners}):
        start, name = max(owner for owner in owners if owner[0] <= label)
        held.append(
            Piece(name, ((label - start, label - start + length), *rest), ((place, place + length), *place_rest))
        )
    return held


def _runs(labels: Tensor, breaks: set[int]) -> list[tuple[int, int, int]]:
    """Return (index, first label, length) of each run of consecutive labels; a label of ``breaks`` starts a new run."""
    if not len(labels):
        return []
    new = labels[1:] != labels[:-1] + 1
    for label in breaks:
        new |= labels[1:] == label
    starts = [0, *(new.nonzero()[:, 0] + 1).tolist()]
    stops = [*starts[1:], len(labels)]
    runs = [(start, int(labels[start]), stop - start) for start, stop in zip(starts, stops, strict=True)]
    return [run for run in runs if run[1] > 0]


def holdings(
    rows: Iterable[Row],
    hf: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    stage: Callable[[Row], int],
    grid: RankGrid,
    expert_rank: Callable[[Row], int | None] = lambda row: None,
) -> list[Holding]:
    """Return every part of every HF tensor with the ranks that hold it, in the table's order.

    Args:
        stage: returns the pipeline stage that holds a row.
        expert_rank: returns the expert-parallel rank that holds a row; None for a row that belongs to no expert.
    """
    held: list[Holding] = []
    cut_alike: dict[Any, list[tuple[int, Box, list[int]]]] = {}  # in all layers and experts: (HF tensor, box, ranks)
    for row in rows:
        kind = row.layout, row.cut, tuple(shapes[name] for name in row.hf)
        if kind not in cut_alike:
            holders: dict[tuple[int, Box], list[int]] = {}
            for tensor_rank in range(grid.tensor):
                for piece in pieces(row, hf, shapes, tensor_rank, grid.tensor):
                    holders.setdefault((row.hf.index(piece.name), piece.box), []).append(tensor_rank)
            cut_alike[kind] = [(*key, holders[key]) for key in sorted(holders)]
        ranks = [grid.ranks(stage(row), tensor_rank, expert_rank(row)) for tensor_rank in range(grid.tensor)]
        for index, box, tensor_ranks in cut_alike[kind]:
            held.append(Holding(row.hf[index], box, tuple(sorted(n for rank in tensor_ranks for n in ranks[rank]))))
    return held
