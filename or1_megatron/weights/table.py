"""The weight table: per model family, which HF tensors make which Megatron tensor, laid out and cut how.

One table serves the load from HF, the handoff to the engines, the export and the converters; nobody else writes a
weight's name. Rows are written once per layer kind, with ``{layer}`` for the layer's number in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from or1_megatron.weights.layout import Layout, Same
from or1_megatron.weights.slicing import Cut

HFConfig = Mapping[str, Any]


def _always(hf: HFConfig) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron tensor and the HF tensors that it is made of."""

    hf: tuple[str, ...]
    axes: tuple[str, ...]
    """Of each HF tensor, one letter per axis: see ``axis_sizes``."""
    megatron: str
    cut: Cut
    layout: Layout = Same()
    when: Callable[[HFConfig], bool] = _always
    """Whether models with this HF config have the row."""

    def at(self, layer: int) -> Row:
        """The row of one layer, placeholders filled in."""
        return Row(
            tuple(name.format(layer=layer) for name in self.hf),
            self.axes,
            self.megatron.format(layer=layer),
            self.cut,
            self.layout,
            self.when,
        )


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Everything that distinguishes one family of HF models for the policy."""

    architecture: str
    """``architectures[0]`` of the HF config."""
    before: tuple[Row, ...]
    layers: tuple[Row, ...]
    after: tuple[Row, ...]
    qk_norm: bool
    qkv_bias: Callable[[HFConfig], bool]

    def rows(self, hf: HFConfig) -> Iterator[Row]:
        """Every row of a model, in the model's order."""
        yield from (row for row in self.before if row.when(hf))
        for layer in range(hf["num_hidden_layers"]):
            yield from (row.at(layer) for row in self.layers if row.when(hf))
        yield from (row for row in self.after if row.when(hf))

    def shapes(self, hf: HFConfig) -> dict[str, tuple[int, ...]]:
        """Every HF tensor of a model, with the shape that its config implies."""
        size = axis_sizes(hf)
        return {
            name: tuple(size[axis] for axis in axes)
            for row in self.rows(hf)
            for name, axes in zip(row.hf, row.axes, strict=True)
        }

    @staticmethod
    def head_dim(hf: HFConfig) -> int:
        return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])

    @staticmethod
    def rope_base(hf: HFConfig) -> float:
        """RoPE's theta, from either of the two places where HF configs have kept it."""
        parameters = hf.get("rope_parameters") or {}
        return float(parameters.get("rope_theta") or hf.get("rope_theta") or 10_000.0)


def axis_sizes(hf: HFConfig) -> dict[str, int]:
    """V vocabulary, H hidden, F intermediate, Q all query heads, K all key (or value) heads, D one head."""
    head_dim = ModelFamily.head_dim(hf)
    return {
        "V": hf["vocab_size"],
        "H": hf["hidden_size"],
        "F": hf["intermediate_size"],
        "Q": hf["num_attention_heads"] * head_dim,
        "K": hf["num_key_value_heads"] * head_dim,
        "D": head_dim,
    }


def tied(hf: HFConfig) -> bool:
    """Whether input embedding and output layer are one tensor."""
    return bool(hf.get("tie_word_embeddings", False))


def untied(hf: HFConfig) -> bool:
    return not tied(hf)
