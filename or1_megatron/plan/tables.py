"""A plan's time as tables for a rich console, and the whole plan as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from or1_megatron.plan.request import PlanRequest
from or1_megatron.plan.run_time import RunTime
from or1_megatron.sizing.memory import PHASES
from or1_megatron.sizing.plan_tables import pairs
from or1_megatron.sizing.run_plan import Plan
from or1_megatron.sizing.storage import disk_bytes, disk_line, node_memory


def time_tables(given: PlanRequest, plan: Plan, time: RunTime) -> RenderableType:
    """Return seconds per verb and stage, what binds, the run's hours, disk, and the estimates' sources."""
    config, hardware = given.config, given.hardware
    fit = hardware.fit_for(plan.shape.parameters, plan.shape.experts is not None)
    stages = Table(title="Time of a step, s", title_justify="left", box=None, padding=(0, 2))
    for heading in ("", *(stage.name for stage in time.stages)):
        stages.add_column(heading, justify="right" if heading else "left")
    for verb in time.step_s:
        stages.add_row(verb, *(f"{stage.step.verbs.get(verb, 0.0):,.1f}" for stage in time.stages))
    stages.add_row("in all", *(f"{stage.step.seconds:,.1f}" for stage in time.stages), style="bold")
    stages.add_row("response tokens per second", *(f"{stage.tokens_per_s:,.0f}" for stage in time.stages))
    stages.add_row("engines decode", *(f"{stage.utilisation:.0%} of a step" for stage in time.stages))
    stages.add_row("hours", *(f"{stage.hours:,.0f}" for stage in time.stages))
    low, high = time.interval
    rows = [
        ("hours", f"{time.hours:,.0f}, between {low:,.0f} and {high:,.0f}: {hardware.error.source}"),
        ("GPU-hours", f"{time.gpu_hours:,.0f} on {time.devices:,} devices"),
        ("evaluation", f"{time.evaluations_s:,.0f} s before and after training"),
        ("binds", time.binds),
        ("hardware", f"{hardware.title}; {fit.update_share.source}"),
        ("lengths", given.lengths.source),
        ("disk", disk_line(config, plan.shape, given.is_for_here)),
    ]
    if plan.device == "cuda":
        rows.append(("host of a node", str(node_memory(config, plan.shape, int(hardware.node_devices.value)))))
    return Group(Padding(stages, (0, 0, 1, 0)), pairs("Run", rows))


def as_dict(plan: Plan, time: RunTime, lacks: Sequence[str]) -> dict[str, Any]:
    """Return the plan for ``--json``. Bytes, seconds, hours; times are means over the run's steps."""
    return {
        "fits": not lacks,
        "lacks": list(lacks),
        "memory": {held.process: {phase: held.at(phase) for phase in PHASES} for held in plan.memory},
        "disk": disk_bytes(plan.config, plan.shape),
        "step_s": time.step_s,
        "stages": {
            stage.name: {
                "steps": stage.count,
                "step_s": stage.step.verbs,
                "hours": stage.hours,
                "tokens_per_s": stage.tokens_per_s,
                "engine_utilization": stage.utilisation,
            }
            for stage in time.stages
        },
        "hours": time.hours,
        "hours_interval": list(time.interval),
        "gpu_hours": time.gpu_hours,
        "binds": time.binds,
    }
