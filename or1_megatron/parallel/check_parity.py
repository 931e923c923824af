"""Compares each parallel layout's numbers with transformers': what one rank of `or1 check-parity` does.

Rank 0 computes the reference with transformers and torch's own AdamW. Each layout runs on as many ranks as it needs.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from or1_megatron.config.schema import ModelConfig
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.parity import Deviation, Numbers, compare, measure, reference, trained_by
from or1_megatron.rl.aggregation import weigh
from or1_megatron.rl.batch import pack
from or1_megatron.rl.objectives.check import PROBE_TEMPERATURE, probe_objective
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.sizing.parallel_layouts import Case, batch_layout, parse_layout
from or1_megatron.types import Aggregation, Sample
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.stacked import part_of, split

_RANK_WAIT_S: Final = 1800.0
_FLOAT64_BYTES: Final = 48
"""Memory per parameter of the float64 reference: values, a copy, gradient, two moments, and the fp32 results."""


def load_network(model: ModelConfig) -> Any:
    """Load the HF model in fp32, with weights rounded to ``model.dtype``, in training mode."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, model.dtype)  # torch has no grouped product of float64 for experts
    network = AutoModelForCausalLM.from_pretrained(model.hf, dtype=dtype, experts_implementation="eager").float()
    return (network.cuda() if torch.cuda.is_available() else network).train()


def record_probe(network: Any, count: int, longest: int, seed: int) -> list[Sample]:
    """Sample ``count`` sequences of 4 to ``longest`` tokens from the model, as a rollout does.

    In each sequence one response token is not counted. Advantages have both signs. The log-probs of the old policy, the
    engine and the reference are the model's plus noise, so that ratios spread over the clip range. The padding token is
    never sampled: transformers gives it no gradient.
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


def transformers_numbers(
    network: Any, samples: Sequence[Sample], judged: Objective, dtype: str, by_response: bool = False
) -> Numbers:
    """Compute transformers' numbers, to which parallel layouts in ``dtype`` are compared."""
    numbers = reference(network, samples, judged, trained_by(dtype), by_response)
    return replace(numbers, gradient=by_file_name(numbers.gradient), moved=by_file_name(numbers.moved))


def references(
    network: Any, samples: Sequence[Sample], judged: Objective, dtype: str, aggregations: Collection[Aggregation]
) -> dict[Aggregation, tuple[Numbers, Deviation]]:
    """Return for each aggregation (reference numbers, transformers' deviation from them by rounding alone).

    If ``dtype`` is float32 and float64 fits in the CPU's memory, the reference is float64, the deviation is fp32's.
    Otherwise the reference is fp32 and the deviation is bf16's; for float32 it is multiplied by 2^-16, the ratio of the
    two types' rounding. The function changes the dtype of ``network``.
    """
    parameters = sum(parameter.numel() for parameter in network.parameters())
    exactly = dtype == "float32" and _FLOAT64_BYTES * parameters < host_memory().free and not torch.cuda.is_available()
    other = torch.float64 if exactly else torch.bfloat16

    def computed() -> dict[Aggregation, Numbers]:
        means = {name: name == "response_mean" for name in aggregations}
        return {name: transformers_numbers(network, samples, judged, dtype, mean) for name, mean in means.items()}

    first = computed()
    network.to(other)
    second = computed()
    if exactly:
        return {name: (second[name], compare(first[name], second[name])) for name in aggregations}
    share = 2.0**-16 if dtype == "float32" else 1.0
    return {name: (first[name], _times(share, compare(second[name], first[name]))) for name in aggregations}


def _times(share: float, deviation: Deviation) -> Deviation:
    return {name: value * share if isinstance(value, float) else value for name, value in deviation.items()}


def by_file_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and split tensors as the weight table does, experts separately; in memory transformers stacks them."""
    named = {}
    for name, tensor in split(tensors).items():
        prefix, joined, last = name.partition(".experts.")
        if not joined or part_of(name):
            named[name] = tensor
            continue
        for expert, of_expert in enumerate(tensor):
            parts = of_expert.chunk(2) if last == "gate_up_proj" else (of_expert,)
            for kind, part in zip(last.removesuffix("_proj").split("_"), parts, strict=True):
                named[f"{prefix}.experts.{expert}.{kind}_proj.weight"] = part
    return named


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

    The dict has ``name``, ``micro_batches`` (of a rank), ``difference`` (the ``Deviation`` from the reference) and
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
