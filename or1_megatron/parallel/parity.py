"""Compares the numbers of parallel layouts with those of transformers: what each rank of `or1 check-parity` runs.

Rank 0 computes the reference with transformers and torch's own AdamW. Each layout runs on as many ranks as it needs.
The recorded batch is scored, differentiated once, and trained on for three steps. The gradient is read off the
parameters: one step of a special optimizer subtracts a known multiple of the gradient from the parameters. This works
for every cut of parameters and gradients, also with the distributed optimizer.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.mesh import Mesh, SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy, WholePolicy
from or1_megatron.rl.aggregation import weigh
from or1_megatron.rl.batch import pack
from or1_megatron.rl.objectives.loss_faults import PROBE_TEMPERATURE, probe_objective
from or1_megatron.rl.objectives.whole_batch import inputs_of, update
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.sizing.parallel_layouts import Case, batch_layout, parse_layout
from or1_megatron.types import Aggregation, Batch, Float32Array, Int32Array, Sample
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.stacked_experts import split

STEPS: Final = 3
_RANK_WAIT_S: Final = 1800.0
_FLOAT64_BYTES: Final = 48
"""Memory per parameter of the float64 reference: values, a copy, gradient, two moments, and the fp32 results."""


_SCALE = 2.0**20
"""The multiple of the gradient that a step subtracts, so large that the parameters' rounding does not show."""
_HUGE = 1e8
_GRADIENT_STEP = OptimizerConfig(lr=_SCALE * _HUGE, eps=_HUGE, beta1=0.0, beta2=0.0, weight_decay=0.0, clip_grad=1e30)
"""Adam without momentum and with a huge eps: p - lr * g / (|g| + eps) = p - _SCALE * g."""


@dataclass(frozen=True)
class Numbers:
    """What one layout, or the reference, computed for the recorded batch; tensors by HF name."""

    log_probs: Sequence[Float32Array]
    """For each sample, the log-probs of its counted tokens."""
    entropies: Sequence[Float32Array]
    losses: Sequence[float]
    """Mean loss over all tokens before each of the three steps."""
    grad_norms: Sequence[float]
    """Gradient norm of each of the three steps, before clipping."""
    gradient: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    """Parameters after the three steps minus the parameters before them."""
    micro_batches: int = 1


def load_network(model: ModelConfig) -> Any:
    """Load the HF model in fp32, with weights rounded to ``model.dtype``, in training mode."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, model.dtype)  # torch has no grouped product of float64 for experts
    network = AutoModelForCausalLM.from_pretrained(model.hf, dtype=dtype, experts_implementation="eager").float()
    return (network.cuda() if torch.cuda.is_available() else network).train()


def cast(network: Any, dtype: torch.dtype) -> None:
    """Give the parameters another dtype. Buffers keep theirs, because bfloat16 would change rotary frequencies."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


def logits_of(network: Any, prompt: Int32Array, response: Int32Array) -> Tensor:
    """Return transformers' logits [n, V] for the n tokens of a response."""
    ids = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
    logits: Tensor = network(ids[None].to(network.device)).logits[0, len(prompt) - 1 : len(ids) - 1]
    return logits


def record_probe(network: Any, count: int, longest: int, seed: int) -> list[Sample]:
    """Sample ``count`` sequences of 4 to ``longest`` tokens from the model, as a rollout does.

    In each sequence one response token is not counted. Advantages have both signs. The old policy, the engine and the
    reference get the model's log-probs plus noise, so that ratios spread over the clip range. The padding token is
    never sampled, because transformers gives its embedding no gradient.
    """
    rng, others = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    generator = torch.Generator().manual_seed(seed)
    vocabulary, padding = network.config.vocab_size, network.config.pad_token_id
    ids = torch.randint(0, vocabulary, (count, 1), generator=generator)
    if padding is not None:
        ids[ids == padding] = (padding + 1) % vocabulary
    device = next(network.parameters()).device
    with torch.no_grad():
        while ids.shape[1] < longest:
            logits = network(ids.to(device)).logits[:, -1].float().cpu() / PROBE_TEMPERATURE
            if padding is not None:
                logits[:, padding] = float("-inf")
            ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
        logits = network(ids.to(device)).logits.float().cpu() / PROBE_TEMPERATURE
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0].numpy()
    made: list[Sample] = []
    for row, of_row in zip(ids.numpy().astype(np.int32), log_probs, strict=True):
        tokens = int(rng.integers(4, longest + 1))
        prompt = int(rng.integers(1, max(2, tokens // 3)))
        mask = np.ones(tokens - prompt, dtype=np.bool_)
        mask[(tokens - prompt) // 2] = False
        own = of_row[prompt - 1 : tokens - 1]
        noise = rng.normal(0.0, 0.3, tokens - prompt)
        engine, reference = others.normal(0.0, 0.3, (2, tokens - prompt))
        made.append(
            Sample(
                prompt_ids=row[:prompt],
                response_ids=row[prompt:tokens],
                advantage=float(rng.normal()),
                loss_mask=mask,
                engine_log_probs=(own + noise + engine).astype(np.float32),
                policy_log_probs=(own + noise).astype(np.float32),
                reference_log_probs=(own + reference).astype(np.float32),
            )
        )
    return made


def trained_by(dtype: str) -> OptimizerConfig:
    """Return the optimizer settings for the three training steps; ``dtype`` decides the learning rate.

    With a smaller eps, gradients that are only rounding errors would cause full-size steps. With a rate three times as
    large, the loss of a trained model would grow to thousands. The rate for bfloat16 makes steps smaller than the
    rounding of weights. A larger step would move the reference's fp32 weights, but not all rounded weights, and losses
    would differ at random. So the steps in bfloat16 show only that an update takes a gradient and leaves finite
    weights. Losses and weights are compared only in float32.
    """
    return OptimizerConfig(lr=3e-4 if dtype == "float32" else 1e-6, eps=1e-3)


def measure(
    model: ModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    batch: Batch,
    order: Sequence[int],
    objective: Objective,
) -> Numbers | None:
    """Measure one parallel layout; return the numbers on rank 0, None on other ranks. Collective.

    ``order`` has, for each sample of the batch, the sample's index among the recorded samples.

    Raises:
        ValueError: the model does not fit the parallel layout.
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
    places = np.argsort(order)  # of the recorded samples in the batch
    return Numbers(
        log_probs=[scores.log_probs[place] for place in places],
        entropies=[scores.entropies[place] for place in places],
        losses=[report.sums["loss"] / report.token_count for report in reports],
        grad_norms=[report.grad_norm for report in reports],
        gradient=gradient,
        moved=_difference(after, before, 1.0),
        micro_batches=len(batch.ranks[0]),
    )


def _whole(policy: MegatronPolicy) -> dict[str, Tensor]:
    """Gather all trained parameters in fp32 on rank 0's host; return {} on other ranks. Collective."""
    return {name: tensor.float().cpu().clone() for name, tensor in policy.trained if tensor is not None}


def _difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {name: (a[name] - b[name]) / scale for name in a}


def reference(
    network: Any, samples: Sequence[Sample], objective: Objective, dtype: str, by_response: bool = False
) -> Numbers:
    """Compute the numbers with plain torch: one unpacked sequence at a time, torch's autograd, clipping and AdamW.

    Args:
        network: from transformers; its parameters are trained in place and restored.
        dtype: the parallel layouts' dtype, which decides the learning rate (``trained_by``).
        by_response: average the loss over each response's tokens and then over responses. If False, over all tokens.
    """
    trained = trained_by(dtype)
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
    return Numbers(log_probs, entropies, losses, norms, by_file_name(network, gradient), by_file_name(network, moved))


def _score(network: Any, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies) of a sample's counted tokens."""
    logits = logits_of(network, sample.prompt_ids, sample.response_ids)
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
    ids, mask = (torch.from_numpy(each).to(log_p.device) for each in (sample.response_ids, sample.loss_mask))
    chosen = log_p.gather(1, ids[:, None].long())[:, 0]
    return chosen[mask], -(log_p.exp() * log_p).sum(-1)[mask]


def _mean_loss(
    scores: Sequence[tuple[Tensor, Tensor]], samples: Sequence[Sample], objective: Objective, by_response: bool
) -> Tensor:
    """Return the mean loss over all tokens; if ``by_response``, over each response and then over responses."""
    counts = torch.tensor([len(log_probs) for log_probs, _ in scores])
    log_probs, entropies = (torch.cat(kind) for kind in zip(*scores, strict=True))
    inputs = inputs_of(samples, log_probs)
    if by_response:
        share = counts.sum() / ((counts > 0).sum() * counts)
        inputs = replace(inputs, weights=share.repeat_interleave(counts).to(log_probs))
    return objective(log_probs, entropies, inputs)[0] / counts.sum()


def references(
    network: Any, samples: Sequence[Sample], judged: Objective, dtype: str, aggregations: Collection[Aggregation]
) -> dict[Aggregation, tuple[Numbers, Deviation]]:
    """Return, for each aggregation, (the reference's numbers, how far rounding alone moves transformers' numbers).

    For ``dtype`` float32 on a machine without GPU and with enough free memory, the reference is computed in float64,
    and the deviation is measured in fp32. In all other cases the reference is computed in fp32, and the numbers'
    change in bf16 is measured. It is the deviation for bfloat16. For float32 the deviation is this change times 2^-16,
    the ratio of fp32's rounding to bf16's. The function changes the dtype of ``network``.
    """
    parameters = sum(parameter.numel() for parameter in network.parameters())
    exactly = dtype == "float32" and _FLOAT64_BYTES * parameters < host_memory().free and not torch.cuda.is_available()

    def computed() -> dict[Aggregation, Numbers]:
        return {name: reference(network, samples, judged, dtype, name == "response_mean") for name in aggregations}

    first = computed()
    cast(network, torch.float64 if exactly else torch.bfloat16)
    second = computed()
    exact, rounded = (second, first) if exactly else (first, second)
    share = 2.0**-16 if dtype == "float32" and not exactly else 1.0
    return {name: (exact[name], _times(share, compare(rounded[name], exact[name]))) for name in aggregations}


def _times(share: float, deviation: Deviation) -> Deviation:
    return {name: value * share if isinstance(value, float) else value for name, value in deviation.items()}


def by_file_name(network: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give transformers' tensors the names in the HF folder; cut stacked experts into a tensor for each expert."""
    from transformers.core_model_loading import revert_weight_conversion

    return split(revert_weight_conversion(network, dict(tensors)))


Deviation = dict[str, Any]
"""The largest differences between one layout's numbers and the reference's.

log_prob, entropy    absolute, over tokens
loss                 absolute, over steps; relative if the reference's loss exceeds 1 in size
grad_norm            relative, over steps
gradient             ||g - g_ref|| / ||g_ref||, largest over tensors; ``gradient_at`` names this tensor
parameters           the same for the change of parameters in three steps; ``parameters_at`` names the tensor
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
    """Return the maximum, or NaN if a value is NaN, so that every bound fails. Python's max() may lose a NaN."""
    return float(np.max(list(values)))


def _worst(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return (largest relative difference of a tensor, the tensor's name); NaN counts as infinite.

    The divisor is at least a thousandth of the largest norm, because smaller norms are mostly rounding.
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


def _measure_case(case: Case, model: ModelConfig, judged: Objective, key: str, world: SubWorld) -> Numbers | None:
    start_process_group(_RANK_WAIT_S, world)
    try:
        mesh = build_mesh(case.parallel, seed=1)
        samples: list[Sample] = pickle.loads(world.store.get(key))  # rank 0 sets the key before it joins this world
        order = case.order(len(samples))
        layout = batch_layout(case.parallel, read_hf_config(model.hf))
        longest = max(sample.response_ids.size for sample in samples)
        weighed = weigh(samples, case.aggregation, longest)
        batch = pack([weighed[i] for i in order], layout)
        return measure(model, case.parallel, mesh, batch, order, judged)
    finally:
        stop_process_group()


def measure_on_ranks(task: Mapping[str, Any], key: str, store: dist.Store, rank: int) -> Iterator[dict[str, Any]]:
    """Do one rank's part in the measurement of a task's parallel layouts; rank 0 yields a dict for each layout.

    The dict has ``name``, ``micro_batches`` (number per rank), ``difference`` (``Deviation`` from the reference) and
    ``rounding`` (the deviation by rounding alone, from ``references``).

    Args:
        task: ``model`` (fields of a ModelConfig), ``layouts``, ``sequences``, ``longest``, ``seed``, and, unless the
            objective is the recipe's, ``objective`` (a name) and ``args``.
        key: the probe's key in the store, different for each task.
        store: shared by all ranks.
    """
    model = ModelConfig(**task["model"])
    judged = probe_objective(model.dtype, task.get("objective", "clipped"), task.get("args", {}))
    cases = [parse_layout(name, task["longest"]) for name in task["layouts"]]
    expected: dict[Aggregation, tuple[Numbers, Deviation]] = {}
    if rank == 0:
        network = load_network(model)
        samples = record_probe(network, task["sequences"], task["longest"], task["seed"])
        store.set(key, pickle.dumps(samples))  # type: ignore[arg-type]  # the stub takes only str
        expected = references(network, samples, judged, model.dtype, {case.aggregation for case in cases})
        del network
    for number, case in enumerate(cases):
        if rank >= case.parallel.ranks:
            continue
        try:
            world = SubWorld(case.parallel.ranks, store, f"{key}/{number}")
            numbers = _measure_case(case, model, judged, key, world)
        except Exception as error:
            error.add_note(f"layout '{case.name}', rank {rank}")
            raise
        if numbers is not None:
            exact, rounding = expected[case.aggregation]
            row = {"name": case.name, "micro_batches": numbers.micro_batches}
            yield {**row, "difference": compare(numbers, exact), "rounding": rounding}
