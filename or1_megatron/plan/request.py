"""What is asked of ``or1 plan``, and what it finds: a plan with its time, and why it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from or1_megatron.config.hardware import Hardware, hardware_of
from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Lengths
from or1_megatron.plan.nearest import Change, nearest_fit
from or1_megatron.plan.run_time import RunTime, run_time
from or1_megatron.plan.step_time import Machine
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.dry_run import plan_run
from or1_megatron.sizing.memory import gib, needed
from or1_megatron.sizing.run_plan import Plan
from or1_megatron.sizing.storage import disk_short, node_memory


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for."""

    path: Path
    overrides: tuple[str, ...]
    config: Config
    folder: Path | None
    """The model shape to plan with where the model is not there."""
    hardware: Hardware
    device: Device
    lengths: Lengths

    def with_overrides(self, more: Sequence[str]) -> PlanRequest:
        overrides = (*self.overrides, *more)
        config = with_gpu_memory(load_config(self.path, overrides), self.hardware, self.device)
        return PlanRequest(self.path, overrides, config, self.folder, self.hardware, self.device, self.lengths)

    def planned(self) -> Plan:
        return plan_run(self.config, self.device, self.folder)


def with_gpu_memory(config: Config, hardware: Hardware, device: Device) -> Config:
    """Return ``config`` with the hardware's GPU memory where it names none."""
    if device == "cpu" or config.cluster.gpu_memory_gb is not None:
        return config
    cluster = config.cluster.model_copy(update={"gpu_memory_gb": hardware.memory_bytes.value / 1e9})
    return config.model_copy(update={"cluster": cluster})


@dataclass(frozen=True)
class PlanOutcome:
    """A plan with its time, and why it does not fit."""

    plan: Plan
    time: RunTime
    lacks: tuple[str, ...]
    """What is lacking, in words."""
    there: int
    """Bytes that a GPU has, or that are free on the host."""

    def nearest_fit(self) -> Change | None:
        """Return the nearest change that fits in this memory; None if it fits already, or nothing does."""
        config, device = self.plan.config, self.plan.device
        if needed(config, self.plan.memory, device) <= self.there:
            return None
        return nearest_fit(config, self.plan.shape, device, self.there)


def outcome(given: PlanRequest) -> PlanOutcome:
    """Plan ``given``. Raises PlanError for a configuration that cannot work at all."""
    planned, config = given.planned(), given.config
    machine = Machine.of(given.hardware, planned.shape, given.device)
    there = _there(given)
    return PlanOutcome(
        planned, run_time(config, machine, given.lengths, planned.held_out), tuple(_lacks(given, planned, there)), there
    )


def _there(given: PlanRequest) -> int:
    """Return the bytes that a GPU has, or that are free on the host."""
    if given.device == "cpu":
        return host_memory().free
    assert given.config.cluster.gpu_memory_gb is not None
    return int(given.config.cluster.gpu_memory_gb * 1e9)


def _lacks(given: PlanRequest, planned: Plan, there: int) -> list[str]:
    """Return what is lacking: memory of a GPU or the host, of a node, disk."""
    config, shape, found = given.config, planned.shape, []
    if (wanted := needed(config, planned.memory, given.device)) > there:
        of = "a GPU has" if given.device == "cuda" else "this machine has free"
        found.append(f"the run needs about {gib(wanted)} of memory, and {of} {gib(there)}")
    if given.device == "cuda":
        has = int(given.hardware.node_memory_bytes.value)
        node = node_memory(config, shape, int(given.hardware.node_devices.value))
        if node.each > has:
            found.append(
                f"a node needs about {gib(node.each)} of host memory, and has {gib(has)}; "
                "checkpoint.asynchronous=false saves the copies"
            )
    if runs_here(given) and (short := disk_short(config, shape)):
        found.append(short)
    return found


def runs_here(given: PlanRequest) -> bool:
    """Return whether the plan is for this machine, as far as its GPU tells: then its disk is the run's."""
    if given.device == "cpu":
        return True
    return torch.cuda.is_available() and hardware_of(torch.cuda.get_device_name()) == given.hardware
