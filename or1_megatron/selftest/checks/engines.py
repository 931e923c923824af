"""Engines beside a trainer: handoffs by every transport that the placement allows, and sleep.

Every handoff ends with the comparison of checksums (the sender makes it) and the log-prob probe. The ranks start
engines as a run does; before each handoff the weights change, so that old ones cannot pass for new ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist

from or1_megatron.config.schema import Config
from or1_megatron.handoff.probe import Probe, ProbeResult
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.policy import MegatronPolicy, WholePolicy
from or1_megatron.rl.batch import pack
from or1_megatron.rollout.cluster import start_ray, stop_ray
from or1_megatron.rollout.engine_group import EngineGroup
from or1_megatron.rollout.pool import EnginePlace, EnginePool
from or1_megatron.selftest.models import add_tokenizer, random_qwen2
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.plans import ENGINE_TOKENS, handoff_config, placements_for, small_shape
from or1_megatron.selftest.process import on_ranks
from or1_megatron.selftest.timing import free_bytes
from or1_megatron.sizing.kv_cache import ENGINE_RESERVE_BYTES
from or1_megatron.sizing.parallel_layouts import batch_layout
from or1_megatron.trainer.placement import engine_places
from or1_megatron.trainer.ranks import trainer_rank
from or1_megatron.trainer.synced_policy import scored_whole

_RUN: Final = "selftest"


def handoff(context: Context) -> None:
    placements = placements_for(context.machine.cuda, context.machine.devices)
    for placement, (ranks, engines, transports) in placements.items():
        for name, handed in run(context, placement, ranks, engines, transports).items():
            what = f"{placement}, {name}: largest log-prob difference, engine and policy, fp32"
            context.require(what, handed["probe"], "nats", at_most=1e-3)
            context.measure(f"{placement}, {name}: bytes sent", handed["bytes"])
            context.measure(f"{placement}, {name}: second handoff", handed["seconds"], "s")


def sleep(context: Context) -> None:
    """Let engines sleep on the trainer's GPUs, as before an update, and bring them back."""
    devices = context.machine.devices
    transports = placements_for(context.machine.cuda, devices)["colocated"][2][:1]
    slept = run(context, "colocated", devices, devices, transports, sleep=True)["sleep"]
    context.require("memory that came free / memory that the engines took", slept["freed"], "share", at_least=0.7)
    context.measure("memory that the engines took", slept["held_gib"], "GiB per device")
    reserve_gib = ENGINE_RESERVE_BYTES / 2**30  # what `or1 plan` expects
    context.measure("memory that they keep while they sleep", slept["kept_gib"], "GiB per device", at_most=reserve_gib)
    context.require("largest log-prob difference after waking, fp32", slept["probe"], "nats", at_most=1e-3)
    context.measure("to sleep", slept["sleep_s"], "s")
    context.measure("to wake, with a handoff", slept["wake_s"], "s")


def run(
    context: Context, placement: str, ranks: int, engines: int, transports: list[str], sleep: bool = False
) -> dict[str, Any]:
    """Start trainer ranks with engines; return their measurements, by transport."""
    model = random_qwen2(small_shape(context.machine.cuda), context.folder, torch.float32)
    add_tokenizer(model)
    config = handoff_config(model, placement, ranks, engines, context.machine.cuda)
    task = {"config": config.model_dump(mode="json"), "transports": transports, "sleep": sleep}
    function = "or1_megatron.selftest.checks.engines:one_rank"
    measured: dict[str, Any] = on_ranks(function, task, ranks, f"the handoff ({placement})")
    return measured


class EngineRank:
    """One trainer rank; rank 0 also holds the engines."""

    def __init__(self, config: Config, mesh: Mesh, policy: MegatronPolicy, engines: EngineGroup | None) -> None:
        self.config, self.mesh, self.policy, self.engines = config, mesh, policy, engines
        self.version = 0
        self.probe = Probe(config.handoff, "float32", policy.hf["vocab_size"], ENGINE_TOKENS)
        samples = [scored_whole(ids) for ids in self.probe.token_ids]
        self._batch = pack(samples, batch_layout(config.parallel, policy.hf))

    def change_weights(self) -> None:
        """Scale every parameter: the same on all ranks, and another model than the engines have."""
        for chunk in self.policy.chunks:
            for parameter in chunk.module.parameters():
                parameter.data.mul_(1.02)

    def hand_off(self, sender: Any) -> tuple[int, float]:
        """Send the weights as the next version; return (bytes, seconds)."""
        self.version += 1
        started_s = time.perf_counter()
        sent = sender.send(self.version)
        return sent, time.perf_counter() - started_s

    def judge(self) -> ProbeResult | None:
        """Compare engines and policy on the probe, and let the engines serve. None on other ranks than 0. Collective.

        Raises:
            HandoffMismatch: they do not compute the same.
        """
        expected = WholePolicy(self.policy).score(self._batch, 1.0).log_probs
        if self.engines is None:
            return None
        result = self.probe.judge(self.engines.score_prompts(self.probe.token_ids), expected)
        self.engines.certify(self.version)
        return result

    def sender(self, transport: str) -> Any:
        settings = self.config.handoff.model_copy(update={"transport": transport})
        return WeightSender(self.policy.weights, self.mesh.rank, settings, self.engines)

    def over(self, transport: str) -> dict[str, Any]:
        """Hand off twice over one transport and probe both; the second time nobody has to meet first."""
        sender = self.sender(transport)
        worst = 0.0
        for _ in range(2):
            self.change_weights()
            sent, seconds = self.hand_off(sender)
            result = self.judge()
            worst = max(worst, result.largest if result else 0.0)
        sender.close()
        return {"bytes": sent, "seconds": seconds, "probe": worst}

    def sleep_and_wake(self, transport: str, held: int) -> dict[str, Any]:
        """Let the engines sleep, look at the memory, wake them with new weights. Collective.

        Args:
            held: bytes of this rank's device that its engine took when it started.
        """
        sender = self.sender(transport)
        self.hand_off(sender)
        before = free_bytes()
        slept_s = self._together(lambda engines: engines.sleep())
        freed = self._sum(free_bytes() - before)
        self._together(lambda engines: engines.wake_up(["weights"]))
        self.change_weights()
        _, woken_s = self.hand_off(sender)
        woken_s += self._together(lambda engines: engines.wake_up(["kv_cache"]))
        result = self.judge()
        sender.close()
        total = self._sum(held)
        return {
            "freed": freed / max(total, 1),
            "held_gib": total / self.mesh.world / 2**30,
            "kept_gib": (total - freed) / self.mesh.world / 2**30,
            "probe": result.largest if result else 0.0,
            "sleep_s": slept_s,
            "wake_s": woken_s,
        }

    def _together(self, call: Any) -> float:
        """Make rank 0's call while the others wait; return its seconds."""
        started_s = time.perf_counter()
        if self.engines is not None:
            call(self.engines)
        dist.barrier(group=self.mesh.control)
        return time.perf_counter() - started_s

    def _sum(self, value: int) -> int:
        total = torch.tensor([value])
        dist.all_reduce(total, group=self.mesh.control)
        return int(total)


def start_engines(config: Config, places: Sequence[EnginePlace] | None, stack: ExitStack) -> EngineGroup:
    """Start the engines on rank 0; they end with ``stack``."""
    cpu = not torch.cuda.is_available()
    model = config.model
    pool = EnginePool(config.rollout, model.hf, model.dtype, ENGINE_TOKENS, _RUN, cpu, places)
    stack.callback(pool.close)
    pool.wait_ready()
    return pool.control(config.handoff.timeout_s)


def one_rank(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Hand off, or sleep and wake, as one trainer rank; rank 0 has the engines and notes the measurements."""
    config = Config.model_validate(task["config"])
    lead = os.environ["RANK"] == "0"
    engines: EngineGroup | None = None
    with ExitStack() as stack:
        if lead:
            start_ray(None, _RUN)
            stack.callback(stop_ray)
        free = free_bytes()
        places = engine_places(config)  # on GPUs, where engines have places, collective: all ranks have looked by then
        if lead:
            engines = start_engines(config, places, stack)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # over gloo: wait for the engines, without NCCL's buffers
        held = free - free_bytes()
        mesh, policy = stack.enter_context(trainer_rank(config))
        rank = EngineRank(config, mesh, policy, engines)
        if task["sleep"]:
            measured = {"sleep": rank.sleep_and_wake(task["transports"][0], held)}
        else:
            measured = {transport: rank.over(transport) for transport in task["transports"]}
        if lead:
            note(measured)
