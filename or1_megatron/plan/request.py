"""The request that ``or1 plan`` answers, and its outcome: the plan, its time, and what memory or disk lacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from or1_megatron.config.hardware import Hardware, hardware_of
from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Lengths
from or1_megatron.plan.run_time import RunTime, run_time
from or1_megatron.plan.step_time import Machine
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.dry_run import plan_run
from or1_megatron.sizing.memory import memory_short
from or1_megatron.sizing.run_plan import Plan
from or1_megatron.sizing.storage import disk_short


@dataclass(frozen=True)
class PlanRequest:
    """The configuration, model shape, hardware and lengths that a plan is made for."""

    config: Config
    """The configuration; for GPUs with ``cluster.gpu_memory_gb`` set."""
    folder: Path | None
    """Folder of the model shape to plan with if the model is missing."""
    hardware: Hardware
    lengths: Lengths

    @property
    def device(self) -> Device:
        return "cuda" if self.hardware.match else "cpu"

    @property
    def is_for_here(self) -> bool:
        """Whether the run would use this machine and its disk: the hardware is a CPU, or the kind of GPU here."""
        if self.device == "cpu":
            return True
        return torch.cuda.is_available() and hardware_of(torch.cuda.get_device_name()) == self.hardware


def outcome(given: PlanRequest) -> tuple[Plan, RunTime, list[str]]:
    """Return the plan, its predicted time, and a text for memory and for disk if there is too little.

    Raises:
        PlanError: the configuration cannot work.
    """
    planned = plan_run(given.config, given.device, given.folder)
    machine = Machine.of(given.hardware, planned.shape, given.device)
    time = run_time(given.config, machine, given.lengths, planned.held_out)
    config, shape = given.config, planned.shape
    there = host_memory().free if given.device == "cpu" else int((config.cluster.gpu_memory_gb or 0.0) * 1e9)
    lacks = [memory_short(config, shape, given.device, there), disk_short(config, shape) if given.is_for_here else ""]
    return planned, time, [line for line in lacks if line]
