"""The gated delta net of a layer with linear attention, over packed rows: no sequence sees another.

Each value head holds a matrix S of key by value channels. A token first lets S decay, then moves what S returns for the
token's key towards the token's value, and reads S with its query (arXiv 2412.06464, equation 10). Before that a short
causal convolution mixes each channel of query, key and value with the tokens before.

Shapes: T tokens of a row, of which a rank holds t = T / CP; G key heads, each with R value heads; A channels of a key
head, B of a value head; C chunks of Q tokens. Tensor parallelism cuts G. Context parallelism cuts it once more: between
the projections a rank has all tokens of its heads.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

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
from or1_megatron.sizing.memory import DELTA_NET_WORK

CHUNK: Final = 64
"""Tokens of a chunk: within it the rule is a few products, from chunk to chunk a loop."""


class PackedDeltaNet(MegatronModule):
    """A layer's linear attention. Megatron builds it as the layer's ``self_attention``.

    The rows of ``in_proj`` and the channels of the convolution lie head by head (``weights.layout.HeadBlocks``), so
    that equal parts are whole heads. Only its inputs are kept for the backward pass, which computes it again, a few
    heads at a time (``sizing.memory.DELTA_NET_WORK``).
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, column: Any, row: Any, pg_collection: Any, **_: Any
    ) -> None:
        """``column``, ``row``: the classes of the projections."""
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
        """Map [t, 1, H] to [t, 1, H] (under sequence parallelism 1 / TP of the tokens), and no bias."""
        row, cp = packed_seq_params, self.groups.cp
        projected, _bias = self.in_proj(hidden_states)
        # Every rank normalises its own heads by the same weight.
        norm = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.groups.tp)
        weights = [x.chunk(cp.size())[cp.rank()] for x in (self.conv1d_weight, self.A_log, self.dt_bias)]
        if row.shard is not None:
            projected = tensor_a2a_cp2hp(projected, 0, -1, cp, undo_attention_load_balancing=False)
            projected = projected.index_select(0, row.shard.to_row_order)
        tokens, heads = len(projected), len(weights[1]) // self.values
        parts = -(-tokens * heads * self.values // DELTA_NET_WORK)
        by_head = [
            projected[:, 0].view(tokens, heads, -1).transpose(0, 1),
            *(x.unflatten(0, (heads, -1)) for x in weights),
        ]
        outputs = [
            checkpoint(self._attend, *part, norm, row.lengths, use_reentrant=False, preserve_rng_state=False)
            for part in zip(*(x.chunk(parts) for x in by_head), strict=True)
        ]
        out = torch.cat(outputs, dim=1)[:, None]
        if row.shard is not None:
            out = out.index_select(0, row.shard.to_row_order.argsort())
            out = tensor_a2a_hp2cp(out, 0, -1, cp, redo_attention_load_balancing=False)
        return self.out_proj(out)[0], None

    def _attend(
        self, projected: Tensor, conv: Tensor, rate: Tensor, bias: Tensor, norm: Tensor, lengths: tuple[int, ...]
    ) -> Tensor:
        """Map [G, T, 2 A + 2 R B + 2 R] projections to [T, G * R * B].

        Args:
            conv: [G, 2 A + R B, 1, taps].
            rate, bias: [G, R]: log of the decay's factor, and what is added to its input.
            norm: [B].
        """
        tokens, r, dtype = projected.shape[1], self.values, projected.dtype
        mixed, gate, beta, alpha = projected.transpose(0, 1).split([self.mixed, r * self.value, r, r], dim=-1)
        mixed = F.silu(causal_convolution(mixed.flatten(1), conv.flatten(0, 2), lengths)).view(tokens, -1, self.mixed)
        query, key, value = mixed.split([self.key, self.key, r * self.value], dim=-1)
        query, key = (unit(x.float()).repeat_interleave(r, dim=1) for x in (query, key))  # [T, G R, A]
        decay = -rate.flatten().float().exp() * F.softplus(alpha.flatten(1).float() + bias.flatten().float())
        value, gate = (x.reshape(tokens, -1, self.value) for x in (value, gate))
        out = gated_delta_rule(query, key, value.float(), decay, beta.flatten(1).sigmoid().float(), lengths).to(dtype)
        normed = F.rms_norm(out.float(), (self.value,), None, self.config.layernorm_epsilon).to(dtype)
        return ((norm * normed) * F.silu(gate.float())).to(dtype).flatten(1)

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


def unit(x: Tensor) -> Tensor:
    """Scale the vectors of the last axis to length 1, but for an epsilon."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def causal_convolution(x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Convolve each channel of [T, channels] with its own ``weight`` [channels, taps], within each sequence.

    The last tap meets the token itself. The sum is computed in fp32.
    """
    position = torch.cat([torch.arange(length) for length in lengths]).to(x.device)
    taps, total = weight.shape[1], torch.zeros_like(x, dtype=torch.float32)
    for back in range(min(taps, max(lengths))):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)].float() * (position >= back)[:, None]
        total = total + earlier * weight[:, taps - 1 - back].float()
    return total.to(x.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Return [T, N, B]: what each token reads, scaled by 1 / sqrt(A); each sequence begins with an empty matrix.

    Within a chunk that begins with the matrix S, write c_i for the sum of ``decay`` up to token i. What token i adds
    along its key k_i is u_i = beta_i (v_i - e^(c_i) S^T k_i - sum over j < i of e^(c_i - c_j) (k_i . k_j) u_j). This is
    a triangular system; its solution is linear in S, so that one solution for all chunks comes before the loop.

    Args:
        query, key: [T, N, A] fp32, of length 1.
        value: [T, N, B] fp32.
        decay: [T, N]: the log of what remains of the matrix, at most 0.
        beta: [T, N]: the share of the way to the value, from 0 to 1.
        lengths: of the sequences; their sum is T.
    """
    chunks = [-(-length // CHUNK) for length in lengths]
    first = [0, *itertools.accumulate(chunks)]
    place = torch.cat([begin * CHUNK + torch.arange(length) for begin, length in zip(first[:-1], lengths, strict=True)])
    place = place.to(value.device)

    def chunked(x: Tensor) -> Tensor:  # [T, N, D] to [C, N, Q, D]; a sequence's last chunk ends in zeros
        padded = x.new_zeros(first[-1] * CHUNK, *x.shape[1:]).index_copy(0, place, x)
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q, k, v, g, b = (chunked(x) for x in (query * key.shape[-1] ** -0.5, key, value, decay[..., None], beta[..., None]))
    total = g.cumsum(2)  # [C, N, Q, 1]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    between = (total - total.mT).masked_fill(later, float("-inf")).exp()  # [C, N, Q, Q]
    system = (b * k) @ k.mT * between  # only what lies below the diagonal counts
    constant = torch.cat((b * v, b * k * total.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, constant, upper=False, unitriangular=True)
    added, erased = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen, decayed = q @ k.mT * between, q * total.exp()
    end = total[:, :, -1:]
    kept, written = end.exp(), (k * (end - total).exp()).mT
    state, outputs = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), []
    begins = set(first)
    for chunk in range(first[-1]):
        if chunk in begins:
            state = torch.zeros_like(state)
        new = added[chunk] - erased[chunk] @ state
        outputs.append(decayed[chunk] @ state + seen[chunk] @ new)
        state = kept[chunk] * state + written[chunk] @ new
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[place]
