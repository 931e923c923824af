"""Fuses HF tensors to a Megatron tensor, and splits it again (QKV, gate/up, delta net, the vocabulary's padding).

Shapes: H hidden, D head dimension, N query heads, G key/value heads (query groups), F intermediate size, V vocabulary,
``...`` a trailing H for weights and nothing for biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of a Megatron tensor: here one unchanged HF tensor, in subclasses several HF tensors, fused."""

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        """Make the Megatron tensor from HF tensors, given in the order of ``Row.hf``."""
        (part,) = parts
        return part

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        """Return the HF tensors that make up a Megatron tensor: the inverse of ``fuse``."""
        return [whole]


@dataclass(frozen=True, slots=True)
class FusedQKV(Layout):
    """Fuses q [N*D, ...], k [G*D, ...], v [G*D, ...] to [G * (N/G + 2) * D, ...], by group: queries, key, value.

    A cut along axis 0 into equal parts then gives every rank whole groups.
    """

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        q, k, v = parts
        groups = hf["num_key_value_heads"]
        rest = q.shape[1:]
        blocks = [x.reshape(groups, -1, *rest) for x in (q, k, v)]
        return torch.cat(blocks, dim=1).reshape(-1, *rest)

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        groups = hf["num_key_value_heads"]
        queries = hf["num_attention_heads"] // groups
        rest = whole.shape[1:]
        block = whole.reshape(groups, -1, *rest)  # [G, (N/G + 2) * D, ...]
        head_dim = block.shape[1] // (queries + 2)
        parts = block.split([queries * head_dim, head_dim, head_dim], dim=1)
        return [x.reshape(-1, *rest) for x in parts]


@dataclass(frozen=True, slots=True)
class GatedQKV(FusedQKV):
    """Fuses like ``FusedQKV``, but q is [N * 2D, ...]: each head's query, then the gate of its attention output.

    The result is [G * (2N/G + 2) * D, ...]: each group's queries, gates, key and value.
    """

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        return FusedQKV.fuse(self, (self._swapped(parts[0], hf, 2), *parts[1:]), hf)

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        twice = {**hf, "num_attention_heads": 2 * hf["num_attention_heads"]}
        q, *others = FusedQKV.split(self, whole, twice)
        return [self._swapped(q, hf, hf["num_attention_heads"] // hf["num_key_value_heads"]), *others]

    @staticmethod
    def _swapped(q: Tensor, hf: Mapping[str, Any], inner: int) -> Tensor:
        """In each group, transpose a matrix of blocks: its rows have ``inner`` blocks, a block has D rows of ``q``."""
        blocks = 2 * hf["num_attention_heads"] // hf["num_key_value_heads"]
        by_group = q.reshape(hf["num_key_value_heads"], blocks // inner, inner, -1, *q.shape[1:])
        return by_group.transpose(1, 2).reshape(q.shape)


@dataclass(frozen=True, slots=True)
class HeadBlocks(Layout):
    """Sorts the tensor rows of a gated delta net into one block per key head; each block has all ``sections`` in turn.

    A cut along axis 0 into equal parts then gives every rank whole heads.
    """

    sections: tuple[str, ...]
    """One string per HF tensor. A letter stands for rows that a key head has: k the rows of its key (or query), v the
    rows of its values (or gates), n one row per value head. If the letters are small, each is a section:
    the tensor has the first letter's rows of all heads, then the next letter's rows of all heads. If they are capitals,
    the whole string is one section: the tensor has all rows of the first head, then all rows of the next head."""

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        heads = hf["linear_num_key_heads"]
        blocks = [
            section.reshape(heads, -1, *part.shape[1:])
            for part, rows in zip(parts, self._rows(hf), strict=True)
            for section in part.split([heads * count for count in rows])
        ]
        return torch.cat(blocks, dim=1).reshape(-1, *parts[0].shape[1:])

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        heads, rest = hf["linear_num_key_heads"], whole.shape[1:]
        counts = self._rows(hf)
        sections = iter(whole.reshape(heads, -1, *rest).split([n for rows in counts for n in rows], dim=1))
        return [torch.cat([next(sections).reshape(-1, *rest) for _ in rows]) for rows in counts]

    def _rows(self, hf: Mapping[str, Any]) -> list[list[int]]:
        """Return, for each HF tensor, the number of tensor rows that a key head has in each of its sections."""
        values = hf["linear_num_value_heads"] // hf["linear_num_key_heads"]
        rows = {"k": hf["linear_key_head_dim"], "v": values * hf["linear_value_head_dim"], "n": values}
        return [
            [sum(rows[letter] for letter in section.lower())] if section.isupper() else [rows[x] for x in section]
            for section in self.sections
        ]


@dataclass(frozen=True, slots=True)
class GateUp(Layout):
    """Fuses gate [F, H] and up [F, H] into [2F, H], gate first."""

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        gate, up = parts
        return torch.cat((gate, up), dim=0)

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        return list(whole.chunk(2, dim=0))


@dataclass(frozen=True, slots=True)
class PaddedVocabulary(Layout):
    """Keeps [V, H] as it is; ``split`` drops the padding rows at the end, which ``slicing.cut`` adds."""

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        return [whole[: hf["vocab_size"]]]
