"""Layout operations: how HF's tensors become one whole Megatron tensor, and back. They are pure and exact.

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
    """One HF tensor is the whole Megatron tensor, not cut for TP; subclasses fuse several, or drop padding."""

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        """Make the Megatron tensor from HF tensors, given in the row's order."""
        (part,) = parts
        return part

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        """Undo ``fuse``."""
        return [whole]


@dataclass(frozen=True, slots=True)
class FusedQKV(Layout):
    """q [N*D, ...], k [G*D, ...], v [G*D, ...] to [G * (N/G + 2) * D, ...]: each group's queries, its key, its value.

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
class GateUp(Layout):
    """gate [F, H], up [F, H] to [2F, H], gate first."""

    def fuse(self, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
        gate, up = parts
        return torch.cat((gate, up), dim=0)

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        return list(whole.chunk(2, dim=0))


@dataclass(frozen=True, slots=True)
class PaddedVocabulary(Layout):
    """[V, H] to [V, H]; ``split`` drops the padding rows that a TP cut adds at the end."""

    def split(self, whole: Tensor, hf: Mapping[str, Any]) -> list[Tensor]:
        return [whole[: hf["vocab_size"]]]
