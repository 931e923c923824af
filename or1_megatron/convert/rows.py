"""Maps HF rows, which include no padding of the vocabulary, to Megatron rows, and names tensors in checkpoints.

A checkpoint stacks the tensors that all layers have: ``decoder.layers.7.mlp.linear_fc2.weight`` is entry 7 of
``decoder.layers.mlp.linear_fc2.weight`` [L, H, F], and an expert's weight is an entry of [L, E, ...]. If layers differ
(some dense, some with experts), layers are not stacked and the layer's number stays in the name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from or1_megatron.weights.decoder import fused_names
from or1_megatron.weights.holdings import pieces
from or1_megatron.weights.table import HFConfig, ModelFamily

PIECE_BYTES: Final = 64 << 20
"""Most bytes that a thread reads at a time, and holds in memory if rows must be converted or put together."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Consecutive rows of one HF tensor that are consecutive in the Megatron tensor too."""

    hf_row: int
    row: int
    rows: int


@dataclass(frozen=True, slots=True)
class HFSource:
    """One HF tensor, whose rows are rows of one Megatron tensor."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    """Blocks of consecutive rows that together cover the HF tensor, in the order of its rows."""

    def pieces(self, itemsize: int) -> Iterator[Run]:
        """Yield runs of at most ``PIECE_BYTES`` that cover all rows; each number has ``itemsize`` bytes."""
        most = max(1, PIECE_BYTES // (math.prod(self.shape[1:]) * itemsize))
        for run in self.runs:
            for begin in range(0, run.rows, most):
                yield Run(run.hf_row + begin, run.row + begin, min(most, run.rows - begin))


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One Megatron tensor of the model, which a checkpoint holds as entry ``index`` of a stack."""

    keys: tuple[str, ...]
    """Names that the stack may have in a checkpoint; our runs' checkpoints use the first name."""
    stack: tuple[int, ...]
    """Leading sizes of the stack (layers, experts); () for a tensor that is not stacked."""
    index: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the tensor itself; the first axis is the rows."""
    sources: tuple[HFSource, ...]
    layer: int | None

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.stack, *self.shape)

    def unstacked(self, key: str) -> str:
        """Return ``key`` with this tensor's layer number: its name in a checkpoint that does not stack layers."""
        return key.replace("decoder.layers.", f"decoder.layers.{self.layer}.") if self.layer is not None else key


def megatron_tensors(family: ModelFamily, hf: HFConfig) -> list[MegatronTensor]:
    """Return all Megatron tensors of a model with HF config ``hf``, in the order of its family's weight table."""
    shapes, rows, experts = family.shapes(hf), list(family.rows(hf)), family.experts(hf)
    layers = hf["num_hidden_layers"] if _alike([row.megatron for row in rows]) else 0
    made = []
    for row in rows:
        parts = [shapes[name] for name in row.hf]
        assert len({shape[1:] for shape in parts}) == 1, f"{row.megatron}: its HF tensors differ in more than rows"
        runs: dict[str, list[Run]] = {name: [] for name in row.hf}
        for piece in pieces(row, hf, shapes, rank=0, size=1):
            (first, stop), (row_there, _) = piece.box[0], piece.place[0]
            runs[piece.name].append(Run(first, row_there, stop - first))
        sources = tuple(HFSource(name, shapes[name], tuple(sorted(of_name))) for name, of_name in runs.items())
        key, stack, index = _stacked(row.megatron, layers, 0 if experts is None else experts.count)
        layer = int(match[1]) if (match := _LAYER.match(row.megatron)) else None
        shape = (sum(shape[0] for shape in parts), *parts[0][1:])
        made.append(MegatronTensor((key, *fused_names(key)), stack, index, shape, sources, layer))
    return made


def draft_tensor(name: str, shape: tuple[int, ...]) -> MegatronTensor:
    """Return a multi-token-prediction tensor (``weights.files.is_draft``). Checkpoints use its HF name and shape."""
    return MegatronTensor((name,), (), (), shape, (HFSource(name, shape, (Run(0, 0, shape[0]),)),), None)


def _alike(names: list[str]) -> bool:
    """Return whether all layers have tensors of the same names."""
    of_layer: defaultdict[int, set[str]] = defaultdict(set)
    for name in names:
        if match := _LAYER.match(name):
            of_layer[int(match[1])].add(name[match.end() :])
    return len({frozenset(tails) for tails in of_layer.values()}) <= 1


def _stacked(name: str, layers: int, experts: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return (name of the stack, its leading sizes, index in the stack). With ``layers`` 0, layers are not stacked."""
    stack: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    if layers and (match := _LAYER.match(name)):
        name = "decoder.layers." + name[match.end() :]
        stack, index = (layers,), (int(match[1]),)
    if match := _EXPERT.search(name):
        name = name[: match.start()] + "experts.experts." + name[match.end() :]
        stack, index = (*stack, experts), (*index, int(match[1]))
    return name, stack, index
