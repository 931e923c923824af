"""The gated delta rule over packed rows against a loop over tokens in float64, and what it keeps for the backward pass.

Not proven here: the layer around it, several ranks (test_families); speed; bf16.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from or1_megatron.sizing.memory import DELTA_NET_WORK, _delta_net_bytes
from or1_megatron.weights.table import DeltaNet

LENGTHS = (5, 130, 1, 64, 70)  # around the chunks of 64
HEADS, KEY, VALUE = 3, 8, 6


def token_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, conv: Tensor) -> Tensor:
    """One sequence: its values convolved with ``conv``, then equation 10 of arXiv 2412.06464, in its own order."""
    taps = conv.shape[-1]
    back = torch.cat((v.new_zeros(taps - 1, *v.shape[1:]), v))
    v = sum(back[j : j + len(v)] * conv[:, j].view(HEADS, VALUE) for j in range(taps))  # type: ignore[assignment]
    state, outputs = v.new_zeros(HEADS, VALUE, KEY), []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        error = v[t] - torch.einsum("nvk,nk->nv", state, k[t])
        state = state + beta[t][:, None, None] * torch.einsum("nv,nk->nvk", error, k[t])
        outputs.append(torch.einsum("nvk,nk->nv", state, q[t]) / KEY**0.5)
    return torch.stack(outputs)


def test_each_sequence_is_by_itself() -> None:
    """Output and gradients of all inputs; a leak over a border would show in all of them."""
    from or1_megatron.parallel.delta_net import causal_convolution, gated_delta_rule, unit

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(LENGTHS)
    sizes = [(tokens, HEADS, KEY), (tokens, HEADS, KEY), (tokens, HEADS, VALUE), (tokens, HEADS), (tokens, HEADS)]
    inputs = [drawn(*shape).requires_grad_() for shape in (*sizes, (HEADS * VALUE, 4))]
    weight = drawn(tokens, HEADS, VALUE)

    def prepared(values: list[Tensor]) -> list[Tensor]:
        q, k, v, decay, beta, conv = values
        return [unit(q), unit(k), v, -torch.nn.functional.softplus(decay), beta.sigmoid(), conv]

    q, k, v, decay, beta, conv = prepared([x.float() for x in inputs])
    mixed = causal_convolution(v.flatten(1), conv, LENGTHS).view(v.shape)
    found = gated_delta_rule(q, k, mixed, decay, beta, LENGTHS).double()
    *parts, conv = prepared(inputs)
    pieces = zip(*(x.split(LENGTHS) for x in parts), strict=True)
    expected = torch.cat([token_by_token(*piece, conv) for piece in pieces])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=2e-5 * float(right.abs().max()))


@pytest.mark.parametrize("channels", [32, 128])
def test_what_is_kept_is_what_the_plan_says(channels: int) -> None:
    from or1_megatron.parallel.delta_net import PackedDeltaNet

    made: Any = SimpleNamespace(values=2, key=channels, value=channels, mixed=4 * channels, config=SimpleNamespace())
    made.config.layernorm_epsilon = 1e-6
    shapes = ((2, 256, 6 * channels + 4), (2, 4 * channels, 1, 4), (2, 2), (2, 2), (channels,))
    kept: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        PackedDeltaNet._attend(made, *(torch.randn(shape, requires_grad=True) for shape in shapes), (128, 128))
    size = sum(storage.nbytes() for storage in kept.values())
    parallel: Any = SimpleNamespace(micro_batch_tokens=256, tensor=1, context=1)
    assert 256 * 4 < DELTA_NET_WORK
    planned = _delta_net_bytes(parallel, DeltaNet(2, 4, channels, channels, 4, (0,)))
    assert size == pytest.approx(planned, rel=0.1)
