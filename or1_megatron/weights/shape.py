"""A model's sizes and parameter counts, from which memory, FLOPs and possible parallel layouts follow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from or1_megatron.weights.families import known_family
from or1_megatron.weights.rope import context_tokens
from or1_megatron.weights.table import DeltaNet, Experts, ModelFamily, has_latents

BYTES: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of one number, by dtype."""


@dataclass(frozen=True, slots=True)
class Latents:
    """The sizes of multi-head latent attention."""

    query: int
    """Number of latents of queries; 0 if queries are projected directly from the hidden state."""
    key: int
    """Number of latents of keys and values."""
    rotated: int
    """Rotated channels of each query, and of the one key that all heads share."""
    value: int
    """Channels of one head's value."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, from HF's config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    """Number of parts into which tensor-parallel engines can cut their KV cache; 1 with latents."""
    head_dim: int
    """Channels of a head's query and key; also of a head's value, unless there are latents."""
    vocab: int
    positions: int
    tied: bool
    experts: Experts | None = None
    latents: Latents | None = None
    delta_net: DeltaNet | None = None
    """Linear attention; None if no layer has it. If some layers have it, the other layers have gated full attention."""
    windowed: range = range(0)
    """The layers whose attention sees only the last ``window`` tokens."""
    window: int = 0
    adapters: Mapping[tuple[int, bool, bool], int] = field(default_factory=dict, compare=False)
    """With LoRA: ``AdapterTable.sizes``."""

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> Shape:
        """Read the sizes from an HF config. Raises KeyError if a key is missing (``read_hf_config`` checks them)."""
        latents, family = None, known_family(hf)
        if has_latents(hf):
            latents = Latents(hf["q_lora_rank"] or 0, hf["kv_lora_rank"], hf["qk_rope_head_dim"], hf["v_head_dim"])
        return cls(
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            intermediate=hf["intermediate_size"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"] if latents is None else 1,
            head_dim=ModelFamily.head_dim(hf),
            vocab=hf["vocab_size"],
            positions=context_tokens(hf),
            tied=bool(hf.get("tie_word_embeddings", False)),
            experts=family.experts(hf) if family else None,
            latents=latents,
            delta_net=family.delta_net(hf) if family else None,
            windowed=(windowed := family.windowed(hf) if family else range(0)),
            window=hf["sliding_window"] if windowed else 0,  # other models may set one and not use it
        )

    @property
    def parameters(self) -> int:
        """Number of weights of embedding, output, attention, MLPs, routers and norms, without biases (below 0.1%)."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self._decoder(whole=True)

    @property
    def trained(self) -> int:
        """Number of weights that are trained and saved: all, or with LoRA only the adapters' weights."""
        return sum(self.adapters.values()) or self.parameters

    def expert_parameters(self, layers: Collection[int] | None = None) -> int:
        """Return the number of weights of the routed experts, in all layers or in ``layers``."""
        if self.experts is None:
            return 0
        sparse = sum(layers is None or layer in layers for layer in self.experts.layers)
        return sparse * self.experts.count * 3 * self.hidden * self.experts.intermediate

    @property
    def multiplied_weights(self) -> int:
        """Number of weights that multiply a token. The count leaves out the experts that do not compute the token,
        and an input embedding that is not also the output layer."""
        return self.vocab * self.hidden + self._decoder(whole=False)

    def layer_parameters(self, layer: int, whole: bool = True) -> int:
        """Return the number of weights of a layer, with all experts (``whole``) or with only one token's experts."""
        every, experts = self.attention_parameters(layer) + 2 * self.hidden, self.experts
        if experts is None or layer not in experts.layers:
            return every + 3 * self.hidden * self.intermediate
        width = (experts.count if whole else experts.chosen) * experts.intermediate + experts.shared
        return every + 3 * self.hidden * width + self.hidden * experts.count  # the router last

    def _decoder(self, whole: bool) -> int:
        """Return the number of weights of all layers and the last norm; ``whole`` as in ``layer_parameters``."""
        return sum(self.layer_parameters(layer, whole) for layer in range(self.layers)) + self.hidden

    def attention_channels(self, layer: int) -> int:
        """Return the number of channels that a layer's attention computes: queries, keys, values, gates, output."""
        if (net := self.delta_net) is not None and layer in net.layers:
            return net.mixed + 2 * net.values + 2 * net.value_heads
        return (2 if net is None else 3) * self.query_channels + self.key_value_channels

    def full_attention(self, layers: Iterable[int] | None = None) -> int:
        """Return how many of all layers, or of ``layers``, have full attention: no delta net and no window."""
        others = self.windowed if self.delta_net is None else self.delta_net.layers
        return sum(layer not in others for layer in (range(self.layers) if layers is None else layers))

    def attention_parameters(self, layer: int) -> int:
        """Return the number of weights of a layer's attention, including the convolution before a delta net."""
        if (latents := self.latents) is None:
            net = self.delta_net
            convolution = net.mixed * net.conv_kernel_dim if net is not None and layer in net.layers else 0
            return self.hidden * self.attention_channels(layer) + convolution
        queries, values = self.heads * self.head_dim, self.heads * latents.value
        of_queries = latents.query * (self.hidden + queries) if latents.query else self.hidden * queries
        of_latents = latents.key * (queries - self.heads * latents.rotated + values)
        return of_queries + of_latents + self.hidden * (latents.key + latents.rotated + values)

    @property
    def query_channels(self) -> int:
        """Number of query channels of one layer, or the mean of query and value channels if the two differ."""
        return self.heads * (self.head_dim if self.latents is None else (self.head_dim + self.latents.value) // 2)

    @property
    def key_value_channels(self) -> int:
        """Number of key and value channels with which a layer computes."""
        return 2 * self.query_channels if self.latents else 2 * self.kv_heads * self.head_dim

    @property
    def attention_width(self) -> int:
        """Number of query channels of all layers with full attention together."""
        return self.full_attention() * self.query_channels

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the KV cache's unsharded bytes per token: keys and values (or latents) of full-attention layers."""
        held = self.key_value_channels if self.latents is None else self.latents.key + self.latents.rotated
        return self.full_attention() * held * BYTES[dtype]

    def state_bytes(self, dtype: str) -> int:
        """Return an engine's unsharded bytes per sequence, of any length, for the layers without full attention.

        A delta net keeps an fp32 matrix per head and the convolution's last inputs; a window keeps keys and values.
        """
        if (net := self.delta_net) is None:
            return len(self.windowed) * self.window * self.key_value_channels * BYTES[dtype]
        matrices = 4 * net.values * net.key_head_dim
        return len(net.layers) * (matrices + (net.conv_kernel_dim - 1) * net.mixed * BYTES[dtype])
