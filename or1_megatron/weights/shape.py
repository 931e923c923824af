"""The sizes of a model, from which memory, FLOPs and possible layouts follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from or1_megatron.weights.families import experts_of
from or1_megatron.weights.rope import context_tokens
from or1_megatron.weights.table import Experts

BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of one number, by dtype."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, from HF's config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    tied: bool
    experts: Experts | None = None
    adapters: Mapping[tuple[int, bool, bool], int] = field(default_factory=dict, compare=False)
    """With LoRA: ``AdapterTable.sizes``."""

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> Shape:
        """Read the sizes. Raises KeyError for keys that ``weights.families.read_hf_config`` has not checked."""
        heads = hf["num_attention_heads"]
        return cls(
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            intermediate=hf["intermediate_size"],
            heads=heads,
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            vocab=hf["vocab_size"],
            positions=context_tokens(hf),
            tied=bool(hf.get("tie_word_embeddings", False)),
            experts=experts_of(hf),
        )

    @property
    def parameters(self) -> int:
        """Weights of embedding, output, attention, gated MLPs, routers and norms; biases are left out (below 0.1%)."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self._decoder(whole=True)

    @property
    def trained(self) -> int:
        """Weights that are trained and saved: all, or with LoRA the adapters' alone."""
        return sum(self.adapters.values()) or self.parameters

    def expert_parameters(self, layers: Collection[int] | None = None) -> int:
        """Weights of the routed experts, of all layers or of ``layers``."""
        if self.experts is None:
            return 0
        sparse = sum(layers is None or layer in layers for layer in self.experts.layers)
        return sparse * self.experts.count * 3 * self.hidden * self.experts.intermediate

    @property
    def multiplied_weights(self) -> int:
        """Weights that multiply a token: all but the input embedding (unless it is also the output layer) and the
        experts that do not compute the token."""
        return self.vocab * self.hidden + self._decoder(whole=False)

    def layer_parameters(self, layer: int, whole: bool = True) -> int:
        """Weights of one layer, with all its experts (``whole``) or only those that compute a token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        every, experts = attention + 2 * self.hidden, self.experts
        if experts is None or layer not in experts.layers:
            return every + 3 * self.hidden * self.intermediate
        width = (experts.count if whole else experts.chosen) * experts.intermediate
        return every + 3 * self.hidden * width + self.hidden * experts.count  # the router last

    def _decoder(self, whole: bool) -> int:
        """Weights of all layers and the last norm."""
        return sum(self.layer_parameters(layer, whole) for layer in range(self.layers)) + self.hidden

    @property
    def attention_width(self) -> int:
        """Query channels of all layers together."""
        return self.layers * self.heads * self.head_dim

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers, unsharded."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]
