"""The weight table's types: a row says which HF tensors make which Megatron tensor, and how tensor parallelism cuts it.

``decoder`` has rows that several families share; each family's other rows are in its own module (see ``families``).

The load from HF, the handoff to the engines, the export and the converters all use this table; weights are named
nowhere else. A row is written once per kind of layer, with ``{layer}`` for the layer's number in the whole model and,
in a mixture of experts, ``{expert}`` for the expert's number in the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from or1_megatron.weights.layout import Layout, PaddedVocabulary
from or1_megatron.weights.slicing import Cut

HFConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the weight table: one Megatron tensor and the HF tensors that it is made of."""

    hf: tuple[str, ...]
    axes: tuple[str, ...]
    """For each HF tensor, a text with one letter per axis (see ``axis_sizes``)."""
    megatron: str
    cut: Cut
    layout: Layout = Layout()
    in_layer: Callable[[HFConfig, int], bool] = lambda hf, layer: True
    """Whether a layer has the row; some models have both dense layers and layers with experts."""
    expert: int | None = None
    """For a weight of an expert: the expert's number in its layer."""
    float32: bool = False
    """Whether the weight is in fp32, whatever the model's dtype."""

    @property
    def per_expert(self) -> bool:
        """Whether the row stands for one tensor per expert."""
        return "{expert}" in self.megatron

    def at(self, layer: int, expert: int | None = None) -> Row:
        """Return this row for one layer (and expert), with the placeholders filled in."""
        return replace(
            self,
            hf=tuple(name.format(layer=layer, expert=expert) for name in self.hf),
            megatron=self.megatron.format(layer=layer, expert=expert),
            expert=expert,
        )


EMBEDDING: Final = Row(
    ("model.embed_tokens.weight",), ("VH",), "embedding.word_embeddings.weight", Cut.VOCABULARY, PaddedVocabulary()
)
FINAL_NORM: Final = Row(("model.norm.weight",), ("H",), "decoder.final_layernorm.weight", Cut.WHOLE)
OUTPUT: Final = Row(("lm_head.weight",), ("VH",), "output_layer.weight", Cut.VOCABULARY, PaddedVocabulary())
"""The output layer's row, for models whose output layer is not the embedding."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The sizes and the routing rule of a mixture of experts."""

    count: int
    """Number of experts in a layer."""
    chosen: int
    """Number of experts that compute a token."""
    intermediate: int
    """Width of one expert."""
    normalised: bool
    """Whether the chosen experts' weights are scaled to sum to one."""
    layers: tuple[int, ...]
    """The layers with experts; the others are dense."""
    shared: int = 0
    """Width of the expert that computes every token; 0 without one."""
    sigmoid: bool = False
    """Whether the router scores each expert by a sigmoid and adds the expert's correction bias only for the choice."""
    scale: float = 1.0
    """Factor of the chosen experts' weights."""
    groups: int | None = None
    """Number of groups of experts, of which a token uses only the best ``chosen_groups``; None: a token may use all."""
    chosen_groups: int | None = None


DELTA_NET_SIZES: Final = tuple(
    f"linear_{size}"
    for size in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The sizes of linear attention by a gated delta net."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    """Taps of the convolution before the delta net, which sees a token and the tokens just before."""
    layers: tuple[int, ...]
    """The layers with a delta net; the other layers have full attention."""

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by axis letter: C convolved channels, T taps, N value heads, B channels of a value head, W all value
        channels, P projected queries, keys, values and gates, Z projected betas and alphas."""
        return {
            "C": self.mixed,
            "T": self.conv_kernel_dim,
            "N": self.value_heads,
            "B": self.value_head_dim,
            "W": self.values,
            "P": self.mixed + self.values,
            "Z": 2 * self.value_heads,
        }

    @property
    def mixed(self) -> int:
        """Number of channels of queries, keys and values, which the convolution mixes."""
        return 2 * self.key_heads * self.key_head_dim + self.values

    @property
    def values(self) -> int:
        """Number of channels of values; the gates of the output have as many."""
        return self.value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """What the policy must know of one family of HF models: weights, unsupported settings, experts, defaults."""

    architecture: str
    """``architectures[0]`` of the HF config."""
    layers: tuple[Row, ...]
    """The rows of a layer; the rows before and after the layers are the same in all families."""
    conflicts: Callable[[HFConfig], Iterator[str]]
    """Yields a sentence for each setting of a config that this package does not support."""
    experts: Callable[[HFConfig], Experts | None] = lambda hf: None
    """Returns the mixture of experts; None for a dense model."""
    delta_net: Callable[[HFConfig], DeltaNet | None] = lambda hf: None
    """Returns the linear attention; None for a model with full attention in all layers."""
    windowed: Callable[[HFConfig], range] = lambda hf: range(0)
    """Returns the layers whose attention sees only the last ``sliding_window`` tokens."""
    zero_centred: bool = False
    """Whether norms multiply by 1 + their weight."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values that transformers takes for keys that a config lacks."""

    def rows(self, hf: HFConfig) -> Iterator[Row]:
        """Yield every row of a model's weight table, in the model's order."""
        yield EMBEDDING
        mixture = self.experts(hf)
        for layer in range(hf["num_hidden_layers"]):
            of_layer = [row for row in self.layers if row.in_layer(hf, layer)]
            yield from (row.at(layer) for row in of_layer if not row.per_expert)
            for expert in range(mixture.count if mixture else 0):
                yield from (row.at(layer, expert) for row in of_layer if row.per_expert)
        yield FINAL_NORM
        if not tied(hf):
            yield OUTPUT

    def has(self, hf: HFConfig, parameter: str) -> bool:
        """Return whether some layer has a Megatron parameter whose name ends with ``parameter``."""
        named = [row for row in self.layers if row.megatron.endswith(parameter)]
        return any(row.in_layer(hf, layer) for row in named for layer in range(hf["num_hidden_layers"]))

    def shapes(self, hf: HFConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of every HF tensor of a model, by name, as its config implies."""
        size = axis_sizes(hf, self.experts(hf), self.delta_net(hf))
        return {
            name: tuple(size[axis] for axis in axes)
            for row in self.rows(hf)
            for name, axes in zip(row.hf, row.axes, strict=True)
        }

    @staticmethod
    def head_dim(hf: HFConfig) -> int:
        """Return the number of channels of a head's query, and of its key."""
        if has_latents(hf):
            return int(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def axis_sizes(hf: HFConfig, experts: Experts | None = None, net: DeltaNet | None = None) -> dict[str, int]:
    """Return the size of each axis letter.

    V vocabulary, H hidden, F intermediate, M number of query heads, D channels of one head, Q channels of all query
    heads, K channels of all key (or value) heads. A mixture of experts has E experts, X intermediate of one expert, S
    intermediate of the shared expert. Latent attention has A latents of queries, L latents of keys and values, R = L +
    channels of the keys' rotated part, U channels of keys and values made of latents, O channels of values. Models with
    a delta net also have G channels of queries and gates of full attention, and the letters of ``DeltaNet.axes``.
    """
    head_dim = ModelFamily.head_dim(hf)
    mixture = {} if experts is None else {"E": experts.count, "X": experts.intermediate, "S": experts.shared}
    latent = {}
    if has_latents(hf):
        latent = {
            "A": hf["q_lora_rank"] or 0,
            "L": hf["kv_lora_rank"],
            "R": hf["kv_lora_rank"] + hf["qk_rope_head_dim"],
            "U": hf["num_attention_heads"] * (hf["qk_nope_head_dim"] + hf["v_head_dim"]),
            "O": hf["num_attention_heads"] * hf["v_head_dim"],
        }
    return {
        **mixture,
        **latent,
        **(net.axes if net else {}),
        "1": 1,
        "V": hf["vocab_size"],
        "H": hf["hidden_size"],
        "F": hf["intermediate_size"],
        "Q": hf["num_attention_heads"] * head_dim,
        "G": 2 * hf["num_attention_heads"] * head_dim,
        "K": hf["num_key_value_heads"] * head_dim,
        "D": head_dim,
        "M": hf["num_attention_heads"],
    }


def has_latents(hf: HFConfig) -> bool:
    """Return whether keys and values are made of latents (multi-head latent attention, arXiv 2405.04434)."""
    return "kv_lora_rank" in hf


def tied(hf: HFConfig) -> bool:
    """Return whether input embedding and output layer are one tensor."""
    return bool(hf.get("tie_word_embeddings", False))
