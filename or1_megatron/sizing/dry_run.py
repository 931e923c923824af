"""`or1 train --dry-run`: read what the arithmetic needs, and show the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import Config
from or1_megatron.data.files import files_of, hub_rows, is_hub_id
from or1_megatron.sizing.run_plan import Device, Plan, PlanError, plan
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.shape import Shape


def plan_run(config: Config, device: Device, shape: Path | None = None) -> Plan:
    """Return the plan of ``config`` with the model and the problem files that it names.

    Args:
        shape: a folder whose config.json takes the model's place; neither weights nor problems are read then.

    Raises:
        ConfigError: a problem file that cannot be counted.
        ModelError: a model that cannot be read.
        PlanError: a plan that cannot work.
    """
    hf = read_hf_config(shape or config.model.hf)
    family_of(hf)
    if shape is not None:
        return plan(config, hf, None, device)
    if config.algorithm.kl.reference is not None:
        check_reference(config.algorithm.kl.reference, hf)
    for held_out in config.evaluate.data:
        _count_rows(held_out.path, held_out.split, "evaluate.data")
    problems = [_count_rows(source.path, source.split, "data.train") for source in config.data.train]
    return plan(config, hf, problems, device)


def check_reference(folder: Path, hf: Mapping[str, Any]) -> None:
    """Raise PlanError where the reference in ``folder`` is not of the architecture that ``hf`` tells of.

    Raises:
        ModelError: the folder holds no model that can be read.
    """
    other = read_hf_config(folder)
    ours, theirs, kinds = Shape.of(hf), Shape.of(other), (hf.get("model_type"), other.get("model_type"))
    different = [] if kinds[0] == kinds[1] else [f"model_type {kinds[1]} (the model has {kinds[0]})"]
    different += [
        f"{field.name} {getattr(theirs, field.name)} (the model has {getattr(ours, field.name)})"
        for field in fields(Shape)
        if field.name != "positions" and getattr(theirs, field.name) != getattr(ours, field.name)
    ]
    if different:
        raise PlanError(
            f"algorithm.kl.reference = {folder} is of another architecture than model.hf: {', '.join(different)}; a "
            "reference is an earlier state of the same model, such as its start or a stage's export"
        )


def _count_rows(path: Path, split: str | None, key: str) -> int:
    """Problems of one set, before anything is filtered out of it. Lines that are not blank, or rows."""
    if path.is_dir():
        return sum(_count_rows(file, None, key) for file in files_of(path, split))
    if is_hub_id(path):
        return sum(1 for _ in hub_rows(str(path), split))
    if not path.is_file():
        raise ConfigError(f"{key}: no such file: {path.resolve()}; expected a .jsonl or .parquet file of problems")
    if path.suffix == ".parquet":
        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{key}: {path} is not a readable parquet file: {error}") from None
    with path.open("rb") as lines:
        return sum(1 for line in lines if not line.isspace())


def render(found: Plan) -> RenderableType:
    """The plan as tables, for any rich console."""
    layout = Table(title="Layout", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in _layout_rows(found):
        layout.add_row(name, value)
    stages = Table(title="Stages", title_justify="left", box=None, padding=(0, 2))
    stages.add_column("")
    for stage in found.stages:
        stages.add_column(stage.name, justify="right")
    for name, values in _stage_rows(found):
        stages.add_row(name, *values)
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in found.warnings]
    return Group(layout, Padding(stages, (1, 0)), *warnings)


def print_plan(found: Plan, console: Console) -> None:
    console.print(render(found))


def _layout_rows(found: Plan) -> list[tuple[str, str]]:
    shape = found.shape
    devices = f"{found.devices} {'GPUs' if found.device == 'cuda' else 'processes at work at once'}"
    kv = "sized by vLLM" if found.kv_tokens is None else f"{found.kv_tokens:,} tokens per engine"
    extras = ", sequence parallel" if found.sequence else ""
    extras += f", experts over {found.expert} ranks" if found.expert > 1 else ""
    extras += f", {found.virtual_pipeline} chunks per stage" if found.virtual_pipeline > 1 else ""
    extras += f", {found.recompute} recompute" if found.recompute != "none" else ""
    problems = "not counted"
    if found.problems is not None:
        problems = f"{found.problems:,}; {found.problems_per_epoch:,} per epoch"
        problems += ", before data.difficulty_model's filter" if found.difficulty_model else ""
    return [
        ("model", f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, hidden {shape.hidden}"),
        (
            "trainer",
            f"{found.ranks} ranks = TP {found.tensor} x PP {found.pipeline} x CP {found.context} x DP {found.data}"
            + extras,
        ),
        ("state per rank", f"{_bytes(found.state_bytes_per_rank)} of weights, gradients and optimizer state"),
        ("activations per rank", f"{_bytes(found.activation_bytes_per_rank)}, estimated"),
        ("micro-batch", f"{found.micro_batch_tokens:,} tokens; the longest sequence is {found.longest_sequence:,}"),
        ("engines", f"{found.engines} x TP {found.engine_tensor}, {found.placement}; {devices}"),
        ("decoding at once", f"{found.concurrent:,} responses; KV cache {kv}"),
        ("problems", problems),
        (
            "in all",
            f"{found.rollout_steps:,} rollout steps, {found.responses_total:,} responses, "
            f"{found.optimizer_steps:,} SGD steps",
        ),
    ]


def _stage_rows(found: Plan) -> list[tuple[str, list[str]]]:
    stages = found.stages
    optional = [
        ("  or to a plateau of", [s.plateau or "-" for s in stages]),
        ("refill, prompts at most", [f"{s.refill_prompts:,}" for s in stages]),
    ]
    shown = [any(s.plateau for s in stages), any(s.refill_prompts for s in stages)]
    return [
        ("rollout steps", [f"{s.steps:,}" for s in stages]),
        *(row for row, is_shown in zip(optional, shown, strict=True) if is_shown),
        ("T, response tokens", [f"{s.max_response_tokens:,}" for s in stages]),
        ("D_R, prompts per step", [f"{s.prompts_per_step:,}" for s in stages]),
        ("D_T, prompts per SGD step", [f"{s.prompts_per_update:,}" for s in stages]),
        ("group size", [f"{s.group_size:,}" for s in stages]),
        ("responses per step", [f"{s.responses_per_step:,}" for s in stages]),
        ("N_SGD, SGD steps per step", [f"{s.sgd_steps:,}" for s in stages]),
        ("samples per SGD step", [f"{s.samples_per_update:,}" for s in stages]),
        ("  per data-parallel rank", [f"{s.samples_per_rank:,}" for s in stages]),
        ("micro-batches per rank, at most", [f"{s.max_micro_batches:,}" for s in stages]),
        ("tokens per step, at most", [f"{s.max_tokens_per_step:,}" for s in stages]),
        ("engine waves per step", [f"{s.waves:.2f}" for s in stages]),
        ("prompts drawn", [f"{s.prompts_total:,}" for s in stages]),
        ("  in epochs", ["?" if s.epochs is None else f"{s.epochs:.2f}" for s in stages]),
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
