"""Ranks: bad updates of a model, what they change, and dumps of a bad and a good one for ``or1 replay``.

Arguments: JSON out, HF folder, folder for dumps.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, SafetyConfig
from or1_megatron.parallel.driver import PolicyDriver, policy_verbs
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import SubWorld, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.reference import FrozenReference
from or1_megatron.parallel.saver import CheckpointSaver
from or1_megatron.rl.batch import pack
from or1_megatron.rl.dump import DumpStore
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.safety import SgdStep, UpdateGuard
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.sizing.parallel_layouts import batch_layout
from or1_megatron.types import Batch, Sample, TokenScores

LOSS = ClippedPolicyLoss(0.2, 0.2, entropy_coefficient=0.1, temperature=0.8, on_policy=False)


@dataclass(frozen=True)
class InfiniteLoss:
    """A loss that is reported infinite while every gradient is finite."""

    temperature: float = 0.8

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        loss = -log_probs.sum()
        return loss, {"loss": loss.detach() + math.inf}


@dataclass(frozen=True)
class InfiniteGradient:
    """A finite loss whose gradient is not: the square root at 0."""

    temperature: float = 0.8

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        loss = (log_probs * 0.0).abs().sqrt().sum()
        return loss, {"loss": loss.detach()}


def samples() -> list[Sample]:
    rng = np.random.default_rng(5)
    made = []
    for prompt, response in [(3, 9), (5, 14), (2, 6), (4, 17), (6, 11)]:
        made.append(
            Sample(
                prompt_ids=rng.integers(0, 61, prompt, dtype=np.int32),
                response_ids=rng.integers(0, 61, response, dtype=np.int32),
                engine_log_probs=rng.normal(-4.0, 0.3, response).astype(np.float32),
                advantage=float(np.float32(rng.normal())),
                loss_mask=np.ones(response, dtype=np.bool_),
            )
        )
    return made


def digest(policy: MegatronPolicy) -> str:
    """Digest this rank's parameters, fp32 master weights and optimizer state."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value, key=str):
                add(value[name])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    for network in policy.networks:
        add(dict(network.named_parameters()))
    for optimizer in policy.optimizer.chained_optimizers:
        inner = optimizer.optimizer
        add([group["params"] for group in inner.param_groups])
        add([inner.state[p] for group in inner.param_groups for p in group["params"] if p in inner.state])
    add(policy.sgd_steps)
    return found.hexdigest()


def bad_updates(everywhere: PolicyDriver, batch: Batch, poisoned: Batch, gather: Any) -> dict[str, Any]:
    """Make each kind of bad update after a good one, which makes optimizer state; return whether it left a trace."""
    scored = everywhere.score(batch, LOSS.temperature)
    good = everywhere.update(batch, LOSS)
    before = gather()
    seen = {}
    for name, told, objective in (
        ("loss", batch, InfiniteLoss()),
        ("gradient", batch, InfiniteGradient()),
        ("both", poisoned, LOSS),
    ):
        report = everywhere.update(told, objective)
        seen[name] = [report.skipped, str(report.sums["loss"]), str(report.grad_norm), gather() == before]
    again = everywhere.update(batch, LOSS)
    assert good.scores is not None
    of_update = [*good.scores.log_probs, *good.scores.entropies]
    apart = [
        float(np.abs(left - right).max())
        for left, right in zip([*scored.log_probs, *scored.entropies], of_update, strict=True)
    ]
    return {
        "good": good.skipped,
        "seen": seen,
        "again": again.skipped,
        "moved": gather() != before,
        "score and update apart": max(apart),
    }


def compare_reference(
    everywhere: PolicyDriver, batch: Batch, started: TokenScores, held_by_reference: Callable[[], int]
) -> dict[str, Any]:
    """Compare two scores of the frozen reference, after updates of the policy, with the policy before them."""

    def as_started(found: TokenScores) -> bool:
        pairs = zip([*found.log_probs, *found.entropies], [*started.log_probs, *started.entropies], strict=True)
        return all(np.array_equal(left, right) for left, right in pairs)

    def scored() -> TokenScores:
        return everywhere.score_reference(batch, 0.8)

    held = [held_by_reference()]
    exact = [as_started(scored()), as_started(scored())]
    held.append(held_by_reference())
    return {"exact": exact, "held_bytes": held, "policy moved": not as_started(everywhere.score(batch, 0.8))}


LAYOUTS = {
    "PP2 VPP2": ParallelConfig(ranks=2, pipeline=2, virtual_pipeline=2, micro_batch_tokens=64),
    "DP2": ParallelConfig(ranks=2, micro_batch_tokens=64),  # the poisoned sample is on one replica alone
    "CP2": ParallelConfig(ranks=2, context=2, head="one_pass", distributed_optimizer=False, micro_batch_tokens=64),
    "TP2 SP": ParallelConfig(ranks=2, tensor=2, sequence=True, micro_batch_tokens=64),
}
"""The updates at the last layout are dumped."""


def serve_or_lead(
    parallel: ParallelConfig, config: ModelConfig, heart: Heartbeat, dumps: Path | None
) -> dict[str, Any]:
    """Make bad updates at one layout; rank 0 returns the results, and dumps two updates if a folder is given."""
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(config, parallel, OptimizerConfig(lr=1e-3), mesh)
    frozen = FrozenReference(config.hf, config.dtype, parallel, mesh, offload=True)

    def digests() -> list[str]:
        everyone: list[str] = [""] * mesh.world
        torch.distributed.all_gather_object(everyone, digest(policy), group=mesh.control)
        return everyone

    def held_by_reference() -> int:
        return sum(p.untyped_storage().nbytes() for chunk in frozen.chunks for p in chunk.parameters())

    saver = CheckpointSaver(policy, asynchronous=False)
    verbs = policy_verbs(policy, saver, frozen) | {"digests": digests, "held_by_reference": held_by_reference}
    lockstep = Lockstep(mesh, verbs, 60, heart)
    if mesh.rank > 0:
        lockstep.serve()
        return {}
    layout = batch_layout(parallel, policy.hf)
    plain = samples()
    bad = [*plain[:3], replace(plain[3], advantage=math.inf), plain[4]]
    batch, poisoned = pack(plain, layout), pack(bad, layout)
    everywhere = PolicyDriver(lockstep, saver)
    started = everywhere.score(batch, 0.8)
    result = bad_updates(everywhere, batch, poisoned, lambda: lockstep.call("digests"))
    result["reference"] = compare_reference(everywhere, batch, started, lambda: lockstep.call("held_by_reference"))
    if dumps is not None:
        context = {"model": config.model_dump(mode="json"), "parallel": parallel.model_dump(mode="json")}
        told: list[str] = []
        guard = UpdateGuard(SafetyConfig(dump_steps=(7,)), everywhere, DumpStore(dumps, 2, context), told.append)  # type: ignore[arg-type]  # the three methods that it uses
        guard.update(SgdStep(7, 0, batch, LOSS))
        guard.update(SgdStep(8, 1, poisoned, LOSS))
        result["told"] = told
    lockstep.close()
    return result


def main() -> None:
    out, model, dumps = (Path(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    store, rank, _ = next(torch.distributed.rendezvous("env://"))
    config = ModelConfig(hf=model, dtype="float32")
    heart = Heartbeat(out.parent / "beats", f"rank {rank}")
    results = {}
    for name, parallel in LAYOUTS.items():
        start_process_group(60, SubWorld(parallel.ranks, store, name))
        results[name] = serve_or_lead(parallel, config, heart, dumps if name == "TP2 SP" else None)
        stop_process_group()
    if rank == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
