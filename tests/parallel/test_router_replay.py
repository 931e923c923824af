"""Given experts at every layout against transformers in float64, whose routers are made to choose the same experts.

The experts are drawn at random, so that they are rarely those that the router prefers. Not tried: Transformer Engine's
layers, several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from recorded_run import LocalPolicy

from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.config.schema import ModelConfig, OptimizerConfig
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.parity import Numbers, compare, load_network, measure, record_probe, reference
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.rl.batch import pack
from or1_megatron.rl.objectives.loss_faults import probe_objective
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.sizing.parallel_layouts import batch_layout, parse_layout
from or1_megatron.trainer.synced_policy import rank_verbs
from or1_megatron.types import RoutedExperts, Sample
from or1_megatron.weights.families import read_hf_config

LAYOUTS = [
    "1",
    "PP2 VPP2 selective rows96",
    "DP2 EP2 one_pass",
    "TP2 PP2 SP full rows96",
    "TP2 CP2 SP EP2 selective",
]
EXPERTS, CHOSEN, SPARSE = 4, 2, (0, 2, 3)
LONGEST = 40


def given(count: int, experts: int, rng: np.random.Generator) -> RoutedExperts:
    """Return [count, layers, k]: different experts of each token and layer."""
    drawn = rng.random((count, len(SPARSE), experts)).argsort(axis=2)[:, :, :CHOSEN]
    return drawn.astype(np.uint8)


def probe(network: Any) -> list[Sample]:
    rng = np.random.default_rng(5)
    samples = record_probe(network, 12, LONGEST, 1)
    tokens = [sample.prompt_ids.size + sample.response_ids.size for sample in samples]
    return [replace(one, routed_experts=given(n - 1, EXPERTS, rng)) for one, n in zip(samples, tokens, strict=True)]


def choose(network: Any, samples: Sequence[Sample]) -> list[Any]:
    """Make the routers of ``network`` choose the samples' experts: each pass over it is of one sample. Return a list
    that gets, from each router of each pass, which tokens [n] it would have sent elsewhere."""
    elsewhere: list[Any] = []
    by_ids = {(*s.prompt_ids.tolist(), *s.response_ids.tolist()): s.routed_experts for s in samples}
    now: list[Any] = []
    network.register_forward_pre_hook(
        lambda module, args: now.__setitem__(slice(None), [by_ids[(*args[0][0].tolist(),)]])
    )

    def routed(gate: Any, place: int) -> Callable[[Any], Any]:
        def forward(hidden: torch.Tensor) -> Any:
            logits = torch.nn.functional.linear(hidden, gate.weight)
            own = logits.topk(CHOSEN).indices
            chosen = torch.cat((torch.from_numpy(now[0][:, place]).long(), own[-1:]))  # the last token has none
            elsewhere.append((own.sort().values != chosen.sort().values).any(1).numpy())
            scores = logits.softmax(-1).gather(1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True), chosen

        return forward

    for place, layer in enumerate(SPARSE):
        gate = network.model.layers[layer].mlp.gate
        gate.forward = routed(gate, place)
    return elsewhere


def numbers_at(model: ModelConfig, layouts: list[str], samples: list[Sample]) -> dict[str, Numbers | None]:
    store, rank, _ = next(dist.rendezvous("env://"))
    found = {}
    for name in layouts:
        case = parse_layout(name, LONGEST)
        if rank >= case.parallel.ranks:
            continue
        start_process_group(ranks.TIMEOUT_S, SubWorld(case.parallel.ranks, store, name))
        mesh = build_mesh(case.parallel, seed=1)
        batch = pack(samples, batch_layout(case.parallel, read_hf_config(model.hf)))
        found[name] = measure(model, case.parallel, mesh, batch, range(len(samples)), probe_objective("float32"))
        stop_process_group()
    return found


def driven_at(model: ModelConfig, layouts: list[str], samples: list[Sample], folder: Path) -> list[dict[str, Any]]:
    """Relay an update from rank 0, as a run does; return by layout what each rank received, and what rank 0 reports."""
    found = []
    for name in layouts:
        parallel_state.destroy_model_parallel()
        parallel = parse_layout(name, LONGEST).parallel
        mesh = build_mesh(parallel, seed=1)
        policy = MegatronPolicy(model, parallel, OptimizerConfig(), mesh)
        received: dict[str, Any] = {}

        def seen(rows: Any, *rest: Any, update: Any = policy.update_and_score, seen: Any = received) -> Any:
            seen["shapes"] = {row.own_experts[0].shape for row in rows}
            seen["whole"] = any(row.routed_experts is not None for row in rows)
            return update(rows, *rest)

        policy.update_and_score = seen  # type: ignore[method-assign,assignment]
        saver = CheckpointSaver(policy, asynchronous=False)
        lockstep = Lockstep(mesh, rank_verbs(policy, saver), 600.0, Heartbeat(folder / name, f"rank {mesh.rank}"))
        if mesh.rank == 0:
            batch = pack(samples, batch_layout(parallel, policy.hf))
            received["row_tokens"] = batch.ranks[0][0].token_ids.size
            received["report"] = LocalPolicy(lockstep, saver, None).update(batch, probe_objective("float32"))
            lockstep.close()
        else:
            lockstep.serve()
        found.append(received)
    return found


@pytest.fixture(scope="module")
def measured(tiny: Callable[..., Path]) -> tuple[Numbers, Numbers, dict[str, Numbers]]:
    """The numbers with given experts, those with the network's own choice, and the policy's by layout."""
    model = ModelConfig(hf=tiny("qwen3_moe"), dtype="float32")
    network = load_network(model).double()
    samples = probe(network)
    own = reference(network, samples, probe_objective("float32"), "float32")
    choose(network, samples)
    exact = reference(network, samples, probe_objective("float32"), "float32")
    return exact, own, ranks.call(numbers_at, 4, model, LAYOUTS, samples, joined=False)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_transformers_with_the_same_experts(layout: str, measured: Any) -> None:
    exact, _, by_layout = measured
    difference = compare(by_layout[layout], exact)
    assert max(difference["log_prob"], difference["entropy"], difference["loss"]) <= 1e-5, difference
    assert max(difference["grad_norm"], difference["gradient"], 0.1 * difference["parameters"]) <= 1e-4, difference


def test_each_rank_receives_its_own_experts_and_the_others_are_counted(
    tiny: Callable[..., Path], measured: Any, tmp_path: Path
) -> None:
    """Shapes: all tokens and the stage's layers, or half the tokens and all layers. The share of tokens and layers that
    the policy would have sent elsewhere is transformers', in fp32 as in float64 but for close calls."""
    model = ModelConfig(hf=tiny("qwen3_moe"), dtype="float32")
    network = load_network(model).double()
    samples = probe(network)
    elsewhere = choose(network, samples)
    expected = 0
    for sample in samples:
        with torch.no_grad():
            network(torch.tensor([[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]]))
        counted = slice(sample.prompt_ids.size - 1, -1)
        expected += sum(int((layer[counted] & sample.loss_mask).sum()) for layer in elsewhere[-len(SPARSE) :])
    layouts = {"TP2 SP": (2, 3, 3), "PP2": (1, 1, 2), "CP2 EP2 selective": (2, 3, 3), "DP2 EP2": (1, 3, 3)}
    by_rank = ranks.call(driven_at, 2, model, list(layouts), samples, tmp_path)
    for at, (name, (cut, *layers)) in enumerate(layouts.items()):
        first = by_rank[0][at]
        sums, tokens = first["report"].sums, first["report"].token_count
        assert sums["rerouted"] * len(SPARSE) == pytest.approx(expected, abs=2), name
        assert 0.5 < sums["rerouted"] / tokens < 1.0
        for rank, here in zip(by_rank, layers, strict=True):
            assert rank[at]["shapes"] == {(first["row_tokens"] // cut, here, CHOSEN)} and not rank[at]["whole"], name


def test_the_given_experts_matter(measured: Any) -> None:
    exact, own, _ = measured
    difference = compare(own, exact)
    assert min(difference[kind] for kind in ("log_prob", "entropy", "gradient", "parameters")) > 0.1
