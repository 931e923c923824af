"""Makes the tables that ``or1 plan`` prints (layout, stages, memory, time), and the JSON of ``or1 plan --json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.config.hardware import Hardware
from or1_megatron.config.resume import leaves
from or1_megatron.config.schema import Config, OptimizerConfig
from or1_megatron.plan.lengths import Lengths
from or1_megatron.plan.run_time import RunTime
from or1_megatron.sizing.conflicts import kv_tokens, longest_row
from or1_megatron.sizing.memory import PHASES, gib, needed
from or1_megatron.sizing.run_plan import Plan, micro_batches
from or1_megatron.sizing.storage import disk_bytes, disk_line, node_memory

Row = tuple[str, str]


def render(planned: Plan) -> RenderableType:
    """Return the tables of a plan, then its warnings, for a rich console."""
    stages = _by_stage("Stages", (stage.name for stage in planned.config.stages))
    for name, values in stage_rows(planned).items():
        stages.add_row(name, *values)
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in planned.warnings]
    return Group(
        _pairs("Layout", _layout_rows(planned)),
        _pairs("Algorithm", _algorithm_rows(planned.config)),
        _pairs("Data", _data_rows(planned)),
        Padding(stages, (0, 0, 1, 0)),
        _pairs(
            "Memory of a GPU, estimated" if planned.device == "cuda" else "Memory, estimated", _memory_rows(planned)
        ),
        *warnings,
    )


def _by_stage(title: str, names: Iterable[str]) -> Table:
    """Return a table without rows: a first column for the rows' names, then a column for each stage."""
    columns = (Column(name, justify="right") for name in names)
    return Table("", *columns, title=title, title_justify="left", box=None, padding=(0, 2))


def _pairs(title: str, rows: Iterable[Row]) -> Padding:
    """Return a titled table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return Padding(table, (0, 0, 1, 0))


def _layout_rows(planned: Plan) -> Iterator[Row]:
    config, shape = planned.config, planned.shape
    parallel, rollout = config.parallel, config.rollout
    devices = f"{config.devices} {'GPUs' if planned.device == 'cuda' else 'processes at work at once'}"
    held = kv_tokens(config, shape)
    kv = "sized by vLLM" if held is None else f"{held:,} tokens per engine"
    extras = ", sequence parallel" if parallel.sequence else ""
    extras += f", experts over {parallel.expert} ranks" if parallel.expert > 1 else ""
    extras += f", {parallel.virtual_pipeline} chunks per stage" if parallel.virtual_pipeline > 1 else ""
    extras += f", {parallel.recompute} recompute" if parallel.recompute != "none" else ""
    adapters = f", LoRA trains {shape.trained / 1e6:,.1f} M" if shape.adapters else ""
    yield "model", f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, hidden {shape.hidden}{adapters}"
    yield (
        "trainer",
        f"{parallel.ranks} ranks = TP {parallel.tensor} x PP {parallel.pipeline} x CP {parallel.context} x DP "
        f"{parallel.data}{extras}",
    )
    yield "micro-batch", f"{parallel.micro_batch_tokens:,} tokens; the longest sequence is {longest_row(config):,}"
    yield "engines", f"{rollout.engines} x TP {rollout.tensor_parallel}, {rollout.placement}; {devices}"
    yield "decoding at once", f"{rollout.engines * rollout.max_concurrent:,} responses; KV cache {kv}"


def _algorithm_rows(config: Config) -> Iterator[Row]:
    """Yield, for the sections algorithm and optimizer, the keys whose values differ from the recipe's."""
    for name, section, plain in (
        ("algorithm", config.algorithm, AlgorithmConfig()),
        ("optimizer", config.optimizer, OptimizerConfig()),
    ):
        before, now = leaves(plain.model_dump(mode="json")), leaves(section.model_dump(mode="json"))
        changed = [f"{key} {value}" for key, value in now.items() if value != before.get(key)]
        yield name, ", ".join(changed) or "the recipe's"


def _data_rows(planned: Plan) -> Iterator[Row]:
    config, titles = planned.config, [source.title for source in planned.config.data.train]
    if planned.problems is not None:
        titles = [f"{count:,} {title}" for count, title in zip(planned.problems, titles, strict=True)]
    model = config.data.difficulty_model
    yield "problems", " + ".join(titles) + ("" if model is None else f", before the filter by {model}'s difficulty")
    yield "evaluation sets", ", ".join(held_out.title for held_out in config.evaluate.data) or "none"


def stage_rows(planned: Plan) -> dict[str, list[str]]:
    """Return, by row name, a value for each stage. Rows that no stage uses are left out.

    Rows named "at most" are upper bounds: they assume that every response has T tokens and no group is rejected.
    """
    config, stages = planned.config, planned.config.stages
    at_once, data = config.rollout.engines * config.rollout.max_concurrent, config.parallel.data
    responses = [s.prompts_per_step * s.group_size for s in stages]
    samples = [s.prompts_per_update * s.group_size for s in stages]
    longest = [config.data.max_prompt_tokens + s.max_response_tokens for s in stages]
    drawn = [s.steps * s.prompts_per_step for s in stages]
    problems = planned.problems
    per_epoch = [
        None if problems is None else sum(n * times for n, times in zip(problems, config.repeats(s), strict=True))
        for s in stages
    ]
    evaluations = [evaluations_within(config, index) for index in range(len(stages))]
    rows = {
        "rollout steps": [f"{s.steps:,}" for s in stages],
        "  or to a plateau of": [s.plateau.metric if s.plateau else "-" for s in stages],
        "T, response tokens": [f"{s.max_response_tokens:,}" for s in stages],
        "temperature": [f"{s.temperature:g}" for s in stages],
        "top_p": [f"{s.top_p:g}" for s in stages],
        "D_R, prompts per step": [f"{s.prompts_per_step:,}" for s in stages],
        "D_T, prompts per SGD step": [f"{s.prompts_per_update:,}" for s in stages],
        "group size": [f"{s.group_size:,}" for s in stages],
        "refill, prompts at most": [f"{s.refill_prompts:,}" if s.refill_prompts else "-" for s in stages],
        "responses per step": [f"{count:,}" for count in responses],
        "N_SGD, SGD steps per step": [f"{s.sgd_steps:,}" for s in stages],
        "samples per SGD step": [f"{count:,}" for count in samples],
        "  per data-parallel rank": [f"{-(-count // data):,}" for count in samples],
        "micro-batches per rank, at most": [f"{micro_batches(config, s):,}" for s in stages],
        "tokens per step, at most": [f"{count * tokens:,}" for count, tokens in zip(responses, longest, strict=True)],
        "engine waves per step": [f"{count / at_once:.2f}" for count in responses],
        "prompts drawn": [f"{count:,}" for count in drawn],
        "  in epochs": [f"{n / epoch:.2f}" if epoch else "?" for n, epoch in zip(drawn, per_epoch, strict=True)],
        "problems per epoch": [f"{epoch:,}" if epoch else "?" for epoch in per_epoch],
        "evaluations": [f"{count:,}" if count else "-" for count in evaluations],
    }
    return {name: values for name, values in rows.items() if set(values) != {"-"}}


def evaluations_within(config: Config, index: int) -> int:
    """Return the number of evaluations due after steps of a stage. The run's last step does not count."""
    stage = config.stages[index]
    every, before = config.evaluate.in_stage(stage).every_steps, sum(s.steps for s in config.stages[:index])
    last = before + stage.steps - (index == len(config.stages) - 1)
    return last // every - before // every if every else 0


def _memory_rows(planned: Plan) -> Iterator[Row]:
    for process in planned.memory:
        yield process.process, str(process)
    if planned.device == "cpu":
        yield "at one time", gib(needed(planned.config, planned.memory, planned.device))


def time_tables(plan: Plan, time: RunTime, hardware: Hardware, lengths: Lengths, here: bool) -> RenderableType:
    """Return tables of predicted time (seconds per verb and stage, hours), disk space, and the estimates' sources.

    ``here``: the run would be on this machine, so the room on this machine's disk is shown.
    """
    config = plan.config
    fit = hardware.fit_for(plan.shape.parameters, plan.shape.experts is not None)
    stages = _by_stage("Time of a step, s", (stage.name for stage in time.stages))
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
        ("lengths", lengths.source),
        ("disk", disk_line(config, plan.shape, here)),
    ]
    if plan.device == "cuda":
        rows.append(("host of a node", str(node_memory(config, plan.shape, int(hardware.node_devices.value)))))
    return Group(Padding(stages, (0, 0, 1, 0)), _pairs("Run", rows))


def as_dict(plan: Plan, time: RunTime, lacks: Sequence[str]) -> dict[str, Any]:
    """Return the plan for ``--json``, in bytes, seconds and hours; ``step_s`` is the mean over the run's steps."""
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
