"""Linear attention (the gated delta net of Qwen3-Next) within each sequence of a packed row.

First a short causal convolution mixes each channel of query, key and value over a token and the tokens just before it.
Then each value head reads and writes its state, a matrix S [A, B]. Each token lets S decay, moves S's output for the
token's key towards the token's value, and reads S with the token's query (arXiv 2412.06464, equation 10).

Shapes: T tokens of a packed row, of which a rank holds t = T / CP; L tokens of a sequence; G key heads, each with R
value heads; A channels of a key head, B of a value head. Tensor parallelism cuts G. Context parallelism cuts G again:
between the projections a rank has all tokens of its heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.ssm.gated_delta_net import tensor_a2a_cp2hp, tensor_a2a_hp2cp
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from or1_megatron.parallel.packed import PackedRow


class PackedDeltaNet(MegatronModule):
    """A layer's linear attention. Megatron builds it as the layer's ``self_attention``.

    The rows of ``in_proj``'s weight and the channels of the convolution are ordered head by head
    (``weights.layout.HeadBlocks``), so that a cut into equal parts gives whole heads. The forward pass keeps only the
    input projections. The backward pass computes everything else again, one sequence after another.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, column: Any, row: Any, pg_collection: Any, **_: Any
    ) -> None:
        """``column`` and ``row`` are the classes of the input projection and of the output projection."""
        super().__init__(config)
        self.groups = pg_collection
        heads, self.values = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        self.key, self.value = config.linear_key_head_dim, config.linear_value_head_dim
        self.mixed, value = 2 * self.key + self.values * self.value, self.values * self.value  # of a key head
        made = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = column(
            config.hidden_size,
            heads * (self.mixed + value + 2 * self.values),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **made,
        )
        self.out_proj = row(
            heads * value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **made,
        )
        local = heads // pg_collection.tp.size()

        def parameter(*shape: int) -> Parameter:
            return Parameter(torch.empty(shape, dtype=config.params_dtype))

        self.conv1d_weight = parameter(local * self.mixed, 1, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = parameter(local * self.values), parameter(local * self.values)
        self.norm_weight = parameter(self.value)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: PackedRow, **_: Any
    ) -> tuple[Tensor, None]:
        """Map hidden states [t, 1, H] to ([t, 1, H], None as bias). With sequence parallelism, t is T / CP / TP."""
        row, cp = packed_seq_params, self.groups.cp
        projected, _bias = self.in_proj(hidden_states)
        # Every rank normalises its own heads by the same weight.
        norm = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.groups.tp)
        weights = [x.chunk(cp.size())[cp.rank()] for x in (self.conv1d_weight, self.A_log, self.dt_bias)]
        if row.shard is not None:
            projected = tensor_a2a_cp2hp(projected, 0, -1, cp, undo_attention_load_balancing=False)
            projected = projected.index_select(0, row.shard.to_row_order)
        attended = [
            checkpoint(self._attend, sequence, *weights, norm, use_reentrant=False, preserve_rng_state=False)
            for sequence in projected[:, 0].split(row.lengths)
        ]
        out = torch.cat(attended)[:, None]
        if row.shard is not None:
            out = out.index_select(0, row.shard.to_row_order.argsort())
            out = tensor_a2a_hp2cp(out, 0, -1, cp, redo_attention_load_balancing=False)
        return self.out_proj(out)[0], None

    def _attend(self, projected: Tensor, conv: Tensor, rate: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
        """Map one sequence's [L, G * (2 A + 2 R B + 2 R)] projections to [L, G * R * B].

        Args:
            conv: the convolution's weight [G * (2 A + R B), 1, taps].
            rate: [G * R]; a token multiplies S by exp(-exp(rate) * softplus(alpha + bias)); alpha is a projection.
            bias: [G * R].
            norm: the norm's weight [B].
        """
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        tokens, r, taps = len(projected), self.values, conv.shape[-1]
        by_head = projected.view(tokens, -1, self.mixed + r * self.value + 2 * r)
        mixed, gate, beta, alpha = by_head.split([self.mixed, r * self.value, r, r], dim=-1)
        convolved = F.conv1d(mixed.flatten(1).t(), conv, padding=taps - 1, groups=len(conv))[:, :tokens]
        query, key, value = F.silu(convolved.t()).view(mixed.shape).split([self.key, self.key, r * self.value], dim=-1)
        value, gate = (x.reshape(tokens, -1, self.value) for x in (value, gate))
        out, _ = torch_chunk_gated_delta_rule(
            *(x.repeat_interleave(r, dim=1)[None] for x in (query, key)),
            value[None],
            g=(-rate.float().exp() * F.softplus(alpha.flatten(1).float() + bias))[None],
            beta=beta.flatten(1).sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )
        normed = F.rms_norm(out[0].float(), norm.shape, None, self.config.layernorm_epsilon).to(norm.dtype)
        return (norm * normed * F.silu(gate.float())).to(norm.dtype).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        cut = dict.fromkeys(("conv1d_weight", "dt_bias", "A_log"), 0)
        groups = {"tp_group": self.groups.tp, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.groups.tp
            )
        return state
