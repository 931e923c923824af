"""Self-test of engines that run with a trainer: sleep, and handoffs by every transport that the placement allows.

After every handoff the sender compares checksums, and the probe compares log-probs. The ranks start engines as a run
does; the weights change before each handoff, so that old weights in the engines are detected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist

from or1_megatron.config.schema import Config
from or1_megatron.handoff.probe import Probe
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.policy import MegatronPolicy, WholePolicy
from or1_megatron.rl.batch import pack
from or1_megatron.rollout.cluster import start_ray, stop_ray
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.selftest.models import add_tokenizer, random_qwen2
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.process import on_ranks
from or1_megatron.selftest.setups import ENGINE_TOKENS, handoff_config, placements_for, small_shape
from or1_megatron.selftest.timing import free_bytes
from or1_megatron.sizing.kv_cache import ENGINE_RESERVE_BYTES
from or1_megatron.sizing.parallel_layouts import batch_layout
from or1_megatron.trainer.placement import engine_places
from or1_megatron.trainer.ranks import trainer_rank
from or1_megatron.trainer.synced_policy import scored_whole

_RUN: Final = "selftest"
_BOUND_NATS: Final = 1e-3
"""Largest allowed difference between log-probs of engine and policy in fp32."""


def handoff(context: Context) -> None:
    placements = placements_for(context.machine.cuda, context.machine.devices)
    for placement, (ranks, engines, transports) in placements.items():
        measured = run(context, placement, ranks, engines, transports)
        for transport, (apart, seconds) in measured.items():
            context.measure(f"{placement}, {transport}", seconds, "s")
            what = f"{placement}, {transport}: largest log-prob difference, engine and policy, fp32"
            context.require(what, apart, "nats", at_most=_BOUND_NATS)


def sleep(context: Context) -> None:
    """Check that engines on the trainer's GPUs free memory while they sleep, and compute the same after waking."""
    devices = context.machine.devices
    transports = placements_for(context.machine.cuda, devices)["colocated"][2][:1]
    slept = run(context, "colocated", devices, devices, transports, sleep=True)
    context.require("memory that came free / memory that the engines took", slept["freed"], "share", at_least=0.7)
    context.measure("memory that the engines took", slept["held_gib"], "GiB per device")
    reserve_gib = ENGINE_RESERVE_BYTES / 2**30  # what `or1 plan` expects
    context.measure("memory that they keep while they sleep", slept["kept_gib"], "GiB per device", at_most=reserve_gib)
    context.require("largest log-prob difference after waking, fp32", slept["probe"], "nats", at_most=_BOUND_NATS)


def run(
    context: Context, placement: str, ranks: int, engines: int, transports: list[str], sleep: bool = False
) -> dict[str, Any]:
    """Run trainer ranks with engines, test handoffs (with ``sleep``: sleep and waking), and return what is measured."""
    model = random_qwen2(small_shape(context.machine.cuda), context.folder, torch.float32)
    add_tokenizer(model)
    config = handoff_config(model, placement, ranks, engines, context.machine.cuda)
    task = {"config": config.model_dump(mode="json"), "transports": transports, "sleep": sleep}
    measured: dict[str, Any] = on_ranks(f"{__name__}:one_rank", task, ranks, f"the handoff ({placement})")
    return measured


class EngineRank:
    """One trainer rank of the check; rank 0 also holds the engines. All ranks must call each method together."""

    def __init__(self, config: Config, mesh: Mesh, policy: MegatronPolicy, pool: EnginePool | None) -> None:
        self.config, self.mesh, self.policy, self.pool = config, mesh, policy, pool
        self.engines = pool.control(config.handoff.timeout_s) if pool else None
        self.version = 0
        self.probe = Probe(config.handoff, "float32", policy.hf["vocab_size"], ENGINE_TOKENS)

    def hand_off(self, sender: Any) -> None:
        """Scale the policy's parameters, so that the engines' weights are out of date, and send the new weights."""
        for chunk in self.policy.chunks:
            for parameter in chunk.module.parameters():
                parameter.data.mul_(1.02)
        self.version += 1
        sender.send(self.version)

    def judge(self) -> float:
        """Compare log-probs of engines and policy on the probe, let engines serve, and return the largest difference.

        Raises:
            HandoffMismatch: the difference exceeds the probe's bound.
        """
        samples = [scored_whole(ids) for ids in self.probe.token_ids]
        batch = pack(samples, batch_layout(self.config.parallel, self.policy.hf))
        expected = WholePolicy(self.policy).score(batch, 1.0).log_probs
        if self.engines is None:
            return 0.0
        result = self.probe.judge(self.engines.score_prompts(self.probe.token_ids), expected)
        self.engines.resume_generation(self.version)
        return result.largest

    def sender(self, transport: str) -> Any:
        settings = self.config.handoff.model_copy(update={"transport": transport})
        return WeightSender(self.policy.weights, self.mesh.rank, settings, self.engines)

    def over(self, transport: str) -> tuple[float, float]:
        """Hand off twice over one transport; return (largest log-prob difference, seconds of the second handoff)."""
        sender = self.sender(transport)
        largest = took_s = 0.0
        for _ in range(2):
            started = time.perf_counter()
            self.hand_off(sender)
            took_s = time.perf_counter() - started
            largest = max(largest, self.judge())
        sender.close()
        return largest, took_s

    def sleep_and_wake(self, transport: str, held: int) -> dict[str, Any]:
        """Let the engines sleep, measure the freed memory, wake them with new weights, and compare log-probs.

        Args:
            held: bytes of device memory that the engine on this rank's device took when it started.
        """
        sender = self.sender(transport)
        self.hand_off(sender)
        before = free_bytes()
        self._call_engines(lambda engines: engines.sleep())
        freed = self._sum(free_bytes() - before)
        self._call_engines(lambda engines: engines.wake_up(["weights"]))
        self.hand_off(sender)
        self._call_engines(lambda engines: engines.wake_up(["kv_cache"]))
        largest = self.judge()
        sender.close()
        total = self._sum(held)
        return {
            "freed": freed / max(total, 1),
            "held_gib": total / self.mesh.world / 2**30,
            "kept_gib": (total - freed) / self.mesh.world / 2**30,
            "probe": largest,
        }

    def _call_engines(self, call: Callable[[Any], None]) -> None:
        """On rank 0, run ``call`` with the engines, while the other ranks wait."""
        if self.engines is not None:
            call(self.engines)
        dist.barrier(group=self.mesh.control)

    def _sum(self, value: int) -> int:
        total = torch.tensor([value])
        dist.all_reduce(total, group=self.mesh.control)
        return int(total)


def one_rank(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Run one trainer rank of the check (handoffs or sleep). Rank 0 has the engines, and notes what was measured."""
    config = Config.model_validate(task["config"])
    lead = os.environ["RANK"] == "0"
    pool: EnginePool | None = None
    with ExitStack() as stack:
        if lead:
            start_ray(None, _RUN)
            stack.callback(stop_ray)
        free = free_bytes()
        places = engine_places(config)  # collective on GPUs: all ranks have read ``free`` before engines start
        if lead:
            cpu, model = not torch.cuda.is_available(), config.model
            rest = (ENGINE_TOKENS, _RUN, cpu, places)
            pool = EnginePool(config.rollout, model.hf, model.dtype, *rest)
            stack.callback(pool.close)
            pool.wait_ready()
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # over gloo: wait for the engines, without NCCL's buffers
        held = free - free_bytes()
        mesh, policy = stack.enter_context(trainer_rank(config))
        rank = EngineRank(config, mesh, policy, pool)
        if task["sleep"]:
            measured = rank.sleep_and_wake(task["transports"][0], held)
        else:
            measured = {transport: rank.over(transport) for transport in task["transports"]}
        if lead:
            note(measured)
