"""Computes a layer's experts (MoE): two GEMMs per expert, and between them one activation for all experts' tokens.

Parameters, names and results (to the bit) are the same as those of Megatron's ``SequentialMLP``. That class is slow if
experts are small, because it calls each expert as a module and activates each expert's tokens separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from or1_megatron.kernels.head_weight_gradient import WeightGradient
from or1_megatron.parallel.weight_gradient import add_weight_gradient


class GroupedExperts(SequentialMLP):
    """The experts of one layer on one rank."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for expert in self.local_experts if self.config.add_bias_linear else ():
            expert.linear_fc2.bias.sequence_parallel = self.config.sequence_parallel  # its gradient is on one rank only

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Map tokens [T, H], sorted by expert, to (outputs [T, H] with biases added, None).

        Args:
            tokens_per_expert: [E] number of tokens of each expert on this rank; the sum is T.
            permuted_probs: [T] the router's weight of each token's expert.
        """
        counts = tokens_per_expert.tolist()
        first, second = (
            [getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")
        )
        gate_and_up = _apply_linears(first, permuted_local_hidden_states, counts)
        probs = permuted_probs.unsqueeze(-1)
        if (clamp := self.config.activation_func_clamp_value) is None:
            return _apply_linears(second, weighted_bias_swiglu_impl(gate_and_up, None, probs), counts), None
        offset = self.config.glu_linear_offset
        hidden = weighted_bias_quick_geglu_impl(gate_and_up, None, probs, False, offset, clamp)
        # Tensor parallelism sums the ranks' outputs: one of them adds the biases.
        return _apply_linears(second, hidden, counts, probs * (self.tp_group.rank() == 0)), None


def _apply_linears(linears: Sequence[Any], x: Tensor, counts: list[int], share: Tensor | int = 1) -> Tensor:
    """Map ``x`` [T, in] to [T, out]: each expert's linear and LoRA adapter map that expert's rows.

    ``share`` [T, 1] multiplies the biases.
    """
    out: Tensor = GroupedProducts.apply(x, counts, *(linear.weight for linear in linears))
    if linears[0].bias is not None and linears[0].bias.numel():
        biases = torch.stack([linear.bias for linear in linears])
        out = out + (biases.repeat_interleave(torch.tensor(counts, device=x.device), dim=0) * share).to(out.dtype)
    adapters = [linear.adapter for linear in linears if hasattr(linear, "adapter") and linear.adapter.enabled]
    if adapters:
        inner = GroupedProducts.apply(x, counts, *(adapter.lora_A for adapter in adapters)) * adapters[0].scale
        out = out + GroupedProducts.apply(inner, counts, *(adapter.by_part(adapter.lora_B) for adapter in adapters))
    return out


class GroupedProducts(torch.autograd.Function):
    """Computes x W^T with a different W for each block of rows. Adds the gradient of each W to ``W.main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        """``x``: [T, in]; ``counts``: rows in each of E blocks; ``weights``: E tensors [out, in]. Returns [T, out]."""
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        return _products(x, counts, [weight.t() for weight in weights])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        trained = ctx.needs_input_grad[2:]
        gradients = [
            WeightGradient(weight) if wanted else None for weight, wanted in zip(weights, trained, strict=True)
        ]
        for of_weight, inputs, outputs in zip(gradients, x.split(ctx.counts), grad.split(ctx.counts), strict=True):
            if len(inputs) and of_weight is not None:
                add_weight_gradient(inputs, outputs, of_weight.sum)
        of_x = _products(grad.contiguous(), ctx.counts, weights)
        return of_x, None, *(None if gradient is None else gradient.for_autograd() for gradient in gradients)


def _products(x: Tensor, counts: list[int], factors: list[Tensor]) -> Tensor:
    """Cut ``x`` [T, in] into blocks of ``counts`` rows; multiply each by its own factor [in, out]; return [T, out]."""
    out = x.new_empty(len(x), factors[0].shape[1])
    for rows, target, factor in zip(x.split(counts), out.split(counts), factors, strict=True):
        if len(rows):
            torch.mm(rows, factor, out=target)
    return out
