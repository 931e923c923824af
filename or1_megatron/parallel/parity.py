"""Measures what a layout computes for a recorded batch, in numbers that can be compared with another layout's.

A probe is scored, differentiated once, and trained on for three steps. The gradient is read off the parameters: one
step of a special optimizer subtracts a known multiple of the gradient from them. That works however parameters and
gradients are cut, with the distributed optimizer too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.policy import MegatronPolicy, WholePolicy
from or1_megatron.rl.objectives.scored import inputs_of, update
from or1_megatron.types import Batch, Float32Array, Sample

STEPS = 3


def trained_by(dtype: str) -> OptimizerConfig:
    """Return the settings of the optimizer that takes the probe's three steps; ``dtype`` decides the learning rate.

    A smaller eps would turn the rounding of gradients into whole steps, and with steps three times as large the loss of
    a trained model grows to thousands. In bfloat16 a step's effect must be smaller than rounding's: the reference's
    fp32 weights follow each step, rounded weights do not, and after steps as large as in fp32 the losses differ at
    random. So in bfloat16 the three steps show only that an update takes a gradient and leaves finite weights; only
    float32 compares them.
    """
    return OptimizerConfig(lr=3e-4 if dtype == "float32" else 1e-6, eps=1e-3)


_SCALE = 2.0**20
"""The multiple of the gradient: large enough that the rounding of the parameters does not show."""
_HUGE = 1e8
_GRADIENT_STEP = OptimizerConfig(lr=_SCALE * _HUGE, eps=_HUGE, beta1=0.0, beta2=0.0, weight_decay=0.0, clip_grad=1e30)
"""Adam without momentum and with a huge eps: p - lr * g / (|g| + eps) = p - _SCALE * g."""


@dataclass(frozen=True)
class Numbers:
    """The results of one computation; tensors by HF name."""

    log_probs: Sequence[Float32Array]
    """For each sample, of its counted tokens."""
    entropies: Sequence[Float32Array]
    losses: Sequence[float]
    """Global token mean before each of the three steps."""
    grad_norms: Sequence[float]
    """Before clipping."""
    gradient: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    """Parameters after the three steps minus those before."""
    micro_batches: int = 1


def measure(
    model: ModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    batch: Batch,
    order: Sequence[int],
    objective: Objective,
) -> Numbers | None:
    """Measure one layout; return the numbers on rank 0, None on other ranks. Collective.

    Args:
        order: for each sample of the batch, its index in the probe.

    Raises:
        ValueError: the model does not fit the layout.
    """
    policy = MegatronPolicy(model, parallel, _GRADIENT_STEP, mesh)
    before, one_pass = _whole(policy), parallel.head == "one_pass"
    update(WholePolicy(policy), batch, objective, one_pass)
    gradient = _difference(before, _whole(policy), _SCALE)
    del policy
    gc.collect()  # hooks refer to the policy; two policies may not fit
    torch.cuda.empty_cache()
    policy = MegatronPolicy(model, parallel, trained_by(model.dtype), mesh)
    trained = WholePolicy(policy)
    scores = trained.score(batch, objective.temperature)
    reports = [update(trained, batch, objective, one_pass) for _ in range(STEPS)]
    after = _whole(policy)
    if mesh.rank > 0:
        return None
    return Numbers(
        log_probs=_in_probe_order(scores.log_probs, order),
        entropies=_in_probe_order(scores.entropies, order),
        losses=[report.sums["loss"] / report.token_count for report in reports],
        grad_norms=[report.grad_norm for report in reports],
        gradient=gradient,
        moved=_difference(after, before, 1.0),
        micro_batches=len(batch.ranks[0]),
    )


def _in_probe_order(values: Sequence[Float32Array], order: Sequence[int]) -> list[Float32Array]:
    by_sample = dict(zip(order, values, strict=True))
    return [by_sample[i] for i in range(len(order))]


def _whole(policy: MegatronPolicy) -> dict[str, Tensor]:
    """Gather all trained parameters in fp32 on rank 0's host; empty on other ranks. Collective."""
    return {name: tensor.float().cpu().clone() for name, tensor in policy.trained if tensor is not None}


def _difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {name: (a[name] - b[name]) / scale for name in a}


def reference(
    network: Any, samples: Sequence[Sample], objective: Objective, trained: OptimizerConfig, by_response: bool = False
) -> Numbers:
    """Compute the numbers with plain torch: one unpacked sequence at a time, torch's autograd, clipping and AdamW.

    Args:
        network: from transformers; its parameters are trained in place and restored.
        trained: ``trained_by`` of the layouts' dtype.
        by_response: take the mean over responses of their token means, instead of the mean over tokens.
    """
    parameters = dict(network.named_parameters())
    start = {name: p.detach().clone() for name, p in parameters.items()}
    betas = (trained.beta1, trained.beta2)
    optimizer = torch.optim.AdamW(network.parameters(), trained.lr, betas, trained.eps, trained.weight_decay)
    scores: list[tuple[Tensor, Tensor]] = []
    gradient: dict[str, Tensor] = {}
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_samples = [_score(network, sample, objective.temperature) for sample in samples]
        scores = scores or [(log_probs.detach(), entropies.detach()) for log_probs, entropies in of_samples]
        loss = _mean_loss(of_samples, samples, objective, by_response)
        loss.backward()
        gradient = gradient or {name: p.grad.float().cpu().clone() for name, p in parameters.items()}
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), trained.clip_grad)))
        optimizer.step()
    moved = {name: (p.detach() - start[name]).float().cpu() for name, p in parameters.items()}
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(start[name])
    log_probs, entropies = ([x.float().cpu().numpy() for x in kind] for kind in zip(*scores, strict=True))
    return Numbers(log_probs, entropies, losses, norms, gradient, moved)


def _score(network: Any, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies) of a sample's counted tokens."""
    ids = torch.from_numpy(np.concatenate((sample.prompt_ids, sample.response_ids)).astype(np.int64))
    logits = network(ids[None].to(network.device)).logits[0]
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)[
        len(sample.prompt_ids) - 1 : len(ids) - 1
    ]
    mask = torch.from_numpy(sample.loss_mask).to(log_p.device)
    chosen = log_p.gather(1, ids[len(sample.prompt_ids) :, None].to(log_p.device))[:, 0]
    return chosen[mask], -(log_p.exp() * log_p).sum(-1)[mask]


def _mean_loss(
    scores: Sequence[tuple[Tensor, Tensor]], samples: Sequence[Sample], objective: Objective, by_response: bool
) -> Tensor:
    """Return the mean loss over all tokens, or over each response's tokens and then over responses."""
    counts = torch.tensor([len(log_probs) for log_probs, _ in scores])
    log_probs, entropies = (torch.cat(kind) for kind in zip(*scores, strict=True))
    inputs = inputs_of(samples, log_probs)
    if by_response:
        share = counts.sum() / ((counts > 0).sum() * counts)
        inputs = replace(inputs, weights=share.repeat_interleave(counts).to(log_probs))
    return objective(log_probs, entropies, inputs)[0] / counts.sum()


Deviation = dict[str, Any]
"""The largest differences between one layout's numbers and the reference's.

log_prob, entropy    absolute, over tokens
loss                 absolute, over steps; of a loss beyond 1 relative to its size
grad_norm            relative, over steps
gradient             ||g - g_ref|| / ||g_ref|| over tensors, and ``gradient_at``: the tensor that has it
parameters           the same of three steps' changes, with ``parameters_at``
"""


def compare(measured: Numbers, expected: Numbers) -> Deviation:
    gradient, gradient_at = _worst(measured.gradient, expected.gradient)
    parameters, parameters_at = _worst(measured.moved, expected.moved)
    return {
        "log_prob": _largest(measured.log_probs, expected.log_probs),
        "entropy": _largest(measured.entropies, expected.entropies),
        "loss": _maximum(abs(a - b) / max(1.0, abs(b)) for a, b in zip(measured.losses, expected.losses, strict=True)),
        "grad_norm": _maximum(abs(a - b) / b for a, b in zip(measured.grad_norms, expected.grad_norms, strict=True)),
        "gradient": gradient,
        "gradient_at": gradient_at,
        "parameters": parameters,
        "parameters_at": parameters_at,
    }


def _largest(measured: Sequence[Float32Array], expected: Sequence[Float32Array]) -> float:
    return _maximum(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(measured, expected, strict=True))


def _maximum(values: Iterable[float]) -> float:
    """Return the maximum; unlike max(), it keeps a NaN, which then exceeds every bound."""
    return float(np.max(list(values)))


def _worst(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return (largest relative difference, the tensor's name); NaN counts as infinite.

    A tensor whose norm is below a thousandth of the largest is compared relative to that thousandth: it is rounding.
    """
    norms = {name: float(tensor.norm()) for name, tensor in expected.items()}
    floor = 1e-3 * max(norms.values())
    worst, where = 0.0, ""
    for name, tensor in expected.items():
        difference = float((measured[name] - tensor).norm()) / max(norms[name], floor)
        difference = float("inf") if difference != difference else difference
        if difference >= worst:
            worst, where = difference, name
    return worst, where
