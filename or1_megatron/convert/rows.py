"""Which rows of which HF tensor are which rows of which Megatron tensor, and what Megatron's checkpoints call it.

A checkpoint stacks what all layers have: ``decoder.layers.7.mlp.linear_fc2.weight`` is entry 7 of
``decoder.layers.mlp.linear_fc2.weight`` [L, H, F], and an expert's weight an entry of [L, E, ...]. Where layers differ
(dense ones among mixtures of experts) the layer stays in the name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from or1_megatron.weights.table import HFConfig, ModelFamily, Row

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one HF tensor that are consecutive in the Megatron tensor too."""

    hf_row: int
    row: int
    rows: int

    def cut(self, most: int) -> Iterator[Run]:
        """In pieces of at most ``most`` rows."""
        for begin in range(0, self.rows, most):
            yield Run(self.hf_row + begin, self.row + begin, min(most, self.rows - begin))


@dataclass(frozen=True, slots=True)
class HFSource:
    """One HF tensor as rows of one entry of a stacked Megatron tensor."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """A Megatron tensor of a checkpoint: entry ``index`` of the ``stack`` of those that share a key."""

    keys: tuple[str, ...]
    """What it may be called, first what this package calls it."""
    stack: tuple[int, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the entry, rows first."""
    sources: tuple[HFSource, ...]
    layer: int | None

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.stack, *self.shape)

    def unstacked(self, key: str) -> str:
        """What ``key`` is where layers are not stacked: the layer is part of the name."""
        return key.replace("decoder.layers.", f"decoder.layers.{self.layer}.") if self.layer is not None else key


def targets(family: ModelFamily, hf: HFConfig) -> list[MegatronTensor]:
    """Every Megatron tensor of a model, in the table's order."""
    shapes = family.shapes(hf)
    rows = list(family.rows(hf))
    stacked = _alike([row.megatron for row in rows])
    experts = 1 + max((int(found[1]) for row in rows if (found := _EXPERT.search(row.megatron))), default=0)
    made = []
    for row in rows:
        parts = [shapes[name] for name in row.hf]
        assert len({shape[1:] for shape in parts}) == 1, f"{row.megatron}: its HF tensors differ in more than rows"
        runs = runs_of(row, [shape[0] for shape in parts], hf)
        sources = tuple(HFSource(*each) for each in zip(row.hf, parts, runs, strict=True))
        shape = (sum(shape[0] for shape in parts), *parts[0][1:])
        made.append(_target(row.megatron, hf["num_hidden_layers"] if stacked else 0, experts, shape, sources))
    return made


def runs_of(row: Row, counts: Sequence[int], hf: HFConfig) -> list[tuple[Run, ...]]:
    """For each HF tensor of a row, with so many rows each, where its rows lie.

    The layout itself says so: it is given the rows' numbers in place of rows.
    """
    first = [sum(counts[:i]) for i in range(len(counts))]
    numbers = [torch.arange(begin, begin + count)[:, None] for begin, count in zip(first, counts, strict=True)]
    fused = row.layout.fuse(numbers, hf)
    order = fused.flatten()
    if fused.shape[1:] != (1,) or not torch.equal(order.sort().values, torch.arange(sum(counts))):
        raise NotImplementedError(f"{row.megatron}: its layout {row.layout} does more than move rows")
    breaks = {0, *(torch.nonzero(order.diff() != 1).flatten() + 1).tolist(), *_borders(order, first[1:])}
    begins = sorted(breaks)
    found: list[list[Run]] = [[] for _ in counts]
    for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
        number = int(order[begin])
        part = max(i for i, start in enumerate(first) if start <= number)
        found[part].append(Run(number - first[part], begin, end - begin))
    return [tuple(sorted(runs, key=lambda run: run.hf_row)) for runs in found]


def _borders(order: torch.Tensor, firsts: Sequence[int]) -> list[int]:
    """Where a tensor begins, in case it follows the one before it without a gap."""
    return [int(torch.nonzero(order == number)[0, 0]) for number in firsts]


def _alike(names: Sequence[str]) -> bool:
    """Whether all layers have the same tensors."""
    of_layer: defaultdict[int, set[str]] = defaultdict(set)
    for name in names:
        if found := _LAYER.match(name):
            of_layer[int(found[1])].add(name[found.end() :])
    return len({frozenset(tails) for tails in of_layer.values()}) <= 1


def _target(
    name: str, layers: int, experts: int, shape: tuple[int, ...], sources: tuple[HFSource, ...]
) -> MegatronTensor:
    stack: list[int] = []
    index: list[int] = []
    key = name
    layer = int(found[1]) if (found := _LAYER.match(name)) else None
    if found and layers:
        key = "decoder.layers." + name[found.end() :]
        stack, index = [layers], [int(found[1])]
    if found := _EXPERT.search(key):
        key = key[: found.start()] + "experts.experts." + key[found.end() :]
        stack, index = [*stack, experts], [*index, int(found[1])]
    assert math.prod(stack) > math.prod(index) or not stack
    return MegatronTensor((key, *_other_names(key)), tuple(stack), tuple(index), shape, sources, layer)


def _other_names(key: str) -> Iterator[str]:
    """Megatron's stock layers fuse a norm with the linear behind it, and call it after that, whoever computes it."""
    for norm, linear in (("input_layernorm.", "self_attention.linear_qkv."), ("pre_mlp_layernorm.", "mlp.linear_fc1.")):
        if f".{norm}" in key:
            yield key.replace(norm, f"{linear}layer_norm_")
