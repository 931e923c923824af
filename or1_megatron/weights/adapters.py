"""The weight table of LoRA adapters, which follows from a family's own table.

A linear y = W x becomes y = W x + alpha / r * B (A x), with A [r, in] and B [out, r]. Every HF tensor has an A and a B
of its own, named as in peft's files. Where Megatron fuses several HF tensors to one linear, their A lie one below
another, and their B are laid out and cut as the linear's rows are. So adapters move by the code that moves weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch import Tensor

from or1_megatron.weights.families import ModelError
from or1_megatron.weights.layout import Layout
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import Experts, HFConfig, ModelFamily, Row

_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class Stacked(Layout):
    """``count`` tensors [r, in] to [count * r, in], one below another."""

    count: int

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        return torch.cat(list(parts))

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        return list(whole.chunk(self.count))


@dataclass(frozen=True, slots=True)
class AdaptedRow:
    """A linear with adapters."""

    linear: Row
    parts: tuple[int, ...]
    """Which of the linear's HF tensors have an adapter."""
    a: Row
    b: Row
    """For all of the linear's HF tensors: the rows of those without an adapter stay zero, and are in no file."""


class AdapterTable:
    """The adapters of a model, with those methods of ``ModelFamily`` that concern rows.

    Args:
        targets: ends of the HF names of linears; empty: all linears.

    Raises:
        ModelError: a target names no linear; the message has the nearest names.
    """

    def __init__(self, family: ModelFamily, hf: HFConfig, rank: int, targets: Collection[str]) -> None:
        self._family, self.rank = family, rank
        linears = [row for row in family.rows(hf) if _is_linear(row)]
        modules = {_module(name) for row in linears for name in row.hf}
        last = sorted({module.rpartition(".")[2] for module in modules})
        self.targets: tuple[str, ...] = tuple(targets) or tuple(last)
        """As in peft's ``target_modules``."""
        if wrong := [t for t in self.targets if not any(_ends(module, t) for module in modules)]:
            nearest = [name for t in wrong for name in get_close_matches(t.rpartition(".")[2], last, 2)]
            raise ModelError(
                f"model.lora.targets: no linear of a {family.architecture} ends in {', '.join(wrong)}; "
                f"{f'did you mean {", ".join(nearest)}? ' if nearest else ''}It has {', '.join(last)}"
            )
        self.adapted = [row for row in map(self._adapted, linears) if row.parts]
        base = family.shapes(hf)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for row in self.adapted:
            outputs, inputs = ([base[name][axis] for name in row.linear.hf] for axis in (0, 1))
            self._shapes |= dict.fromkeys(row.a.hf, (rank, inputs[0]))
            self._shapes |= {name: (out, rank) for name, out in zip(row.b.hf, outputs, strict=True)}
        self.names = frozenset(
            name for row in self.adapted for part in row.parts for name in _names(row.linear.hf[part])
        )
        """The tensors of a file of adapters."""
        self.sizes: Counter[tuple[int, bool, bool]] = Counter()
        """How many numbers the adapters have, by (layer, whether of experts, whether cut by tensor parallelism)."""
        for factor in self.rows(hf):
            key = int(factor.megatron.split(".")[2]), factor.expert is not None, factor.cut is not Cut.WHOLE
            self.sizes[key] += sum(math.prod(self._shapes[name]) for name in factor.hf)

    def _adapted(self, row: Row) -> AdaptedRow:
        module = row.megatron.removesuffix(_WEIGHT) + ".adapter."
        chosen = (any(_ends(_module(name), t) for t in self.targets) for name in row.hf)
        parts = tuple(index for index, yes in enumerate(chosen) if yes)
        a, b = zip(*map(_names, row.hf), strict=True)
        by_columns = row.cut is Cut.ROW
        return AdaptedRow(
            row,
            parts,
            Row(
                tuple(a[part] for part in parts),
                (),
                module + "lora_A",
                Cut.ROW if by_columns else Cut.WHOLE,
                Stacked(max(1, len(parts))),
                expert=row.expert,
            ),
            Row(b, (), module + "lora_B", Cut.WHOLE if by_columns else row.cut, row.layout, expert=row.expert),
        )

    def rows(self, hf: HFConfig) -> Iterator[Row]:
        for row in self.adapted:
            yield from (row.a, row.b)

    def shapes(self, hf: HFConfig) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def experts(self, hf: HFConfig) -> Experts | None:
        return self._family.experts(hf)


def _is_linear(row: Row) -> bool:
    """Whether a row is the weight of a linear that tensor parallelism cuts: no norm, bias, router or embedding."""
    return row.cut not in (Cut.WHOLE, Cut.VOCABULARY) and all(name.endswith(_WEIGHT) for name in row.hf)


def _module(weight: str) -> str:
    """Return the name that targets are compared with: a layer's experts have adapters all or none."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", weight.removesuffix(_WEIGHT))


def _ends(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _names(weight: str) -> tuple[str, str]:
    """Return the names of the A and B of an HF weight."""
    module = weight.removesuffix(_WEIGHT)
    return f"{module}.lora_A{_WEIGHT}", f"{module}.lora_B{_WEIGHT}"
