"""Checks, before anything starts, whether a run's configuration can work, and collects warnings.

The checks are arithmetic on a Config, the model's HF config.json and the number of problems in the data files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.config.base import ConfigError, DataFileMissing
from or1_megatron.config.schema import Config, StageConfig
from or1_megatron.data.problems import files_of, is_hub_id, is_saved, read_rows
from or1_megatron.sizing.conflicts import Device, conflicts, longest_row, padded_sequence, within_reach
from or1_megatron.sizing.memory import ProcessMemory, process_memory
from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.shape import Shape
from or1_verify.errors import UserError


class PlanError(UserError, ValueError):
    """A configuration cannot work; the message has one line per conflict, with its numbers and a way out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration that can work, with the model, device and data that it was checked for."""

    config: Config
    shape: Shape
    device: Device
    memory: tuple[ProcessMemory, ...]
    """Estimated memory of the run's processes."""
    problems: tuple[int, ...] | None
    """Number of problems of each training source; None if not counted."""
    held_out: tuple[int, ...] | None
    """Number of problems of each evaluation set; None if not counted."""
    warnings: tuple[str, ...]


def plan_run(config: Config, device: Device, shape: Path | None = None) -> Plan:
    """Return the plan of ``config``. This reads the config.json and the problem files that ``config`` names.

    ``shape``: a folder whose config.json replaces the model's; the problem files are then not read.

    Raises:
        ConfigError: a problem file is missing or cannot be read.
        ModelError: the model's config.json cannot be read.
        PlanError: the configuration cannot work.
    """
    hf = read_hf_config(shape or config.model.hf)
    if shape is not None:
        return plan(config, hf, None, device)
    if config.algorithm.kl.reference is not None:
        check_reference(config.algorithm.kl.reference, hf)
    held_out = [_count_rows(source.path, source.split, "evaluate.data") for source in config.evaluate.data]
    problems = [_count_rows(source.path, source.split, "data.train") for source in config.data.train]
    return plan(config, hf, problems, device, held_out)


def check_reference(folder: Path, hf: Mapping[str, Any]) -> None:
    """Raise PlanError if the KL reference in ``folder`` differs in architecture from the model's HF config ``hf``.

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
    """Return the number of data rows of a problem set, before any filter; errors name the configuration key ``key``."""
    if path.is_dir() and not is_saved(path):
        return sum(_count_rows(file, None, key) for file in files_of(path, split))
    if not path.exists() and not is_hub_id(path):
        raise DataFileMissing(f"{key}: no such file: {path.resolve()}; expected a .jsonl or .parquet file of problems")
    if path.suffix == ".parquet":
        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{key}: {path} is not a readable parquet file: {error}") from None
    return sum(1 for _ in read_rows(path, split))


def plan(
    config: Config,
    hf: Mapping[str, Any],
    problems: Sequence[int] | None = None,
    device: Device = "cpu",
    held_out: Sequence[int] | None = None,
) -> Plan:
    """Check ``config`` for a model with HF config ``hf``, and return the plan.

    Args:
        problems: number of problems of each source of data.train; None: unknown.
        held_out: number of problems of each set of evaluate.data; None: unknown.

    Raises:
        PlanError: the configuration cannot work; the message has a line per conflict.
        ModelError: the targets of ``model.lora`` match no linear.
    """
    shape, lora = Shape.of(hf), config.model.lora
    if lora is not None:
        shape = replace(shape, adapters=AdapterTable(family_of(hf), hf, lora.rank, lora.targets).sizes)
    if lines := list(conflicts(config, shape, problems, device)):
        raise PlanError("this configuration cannot work:\n" + "\n".join(f"  - {line}" for line in lines))
    return Plan(
        config=config,
        shape=shape,
        device=device,
        memory=process_memory(config, shape, device),
        problems=None if problems is None else tuple(problems),
        held_out=None if held_out is None else tuple(held_out),
        warnings=(*_warnings(config), *(() if problems is None else _problem_warnings(config, problems))),
    )


def micro_batches(config: Config, stage: StageConfig) -> int:
    """Return the largest number of micro-batches that a data-parallel rank can have in an SGD step."""
    samples = -(-stage.prompts_per_update * stage.group_size // config.parallel.data)
    # A packed row is closed only when the next sequence does not fit, so it holds at least this many sequences.
    per_row = config.parallel.micro_batch_tokens // padded_sequence(config, stage)
    multiple = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
    rows = -(-samples // per_row)
    return -(-rows // multiple) * multiple


def _warnings(config: Config) -> Iterator[str]:
    if not config.evaluate.data:
        yield "evaluate.data is empty: no accuracy before and after, and no best checkpoint"
    elif config.evaluate.temperature == 0 and config.evaluate.samples > 1:
        yield f"evaluate.temperature is 0: its {config.evaluate.samples} samples per problem will be the same"
    longest, budget = longest_row(config), config.parallel.micro_batch_tokens
    if 2 * budget < 3 * longest and any(micro_batches(config, stage) > 1 for stage in config.stages):
        yield (
            f"parallel.micro_batch_tokens = {budget} is close to the longest sequence, {longest}: rows of one length "
            "then pad by several percent; with 1.5 times it or more they pad by less than 1%"
        )
    # All SGD steps up to the end of this run, those of earlier stages included.
    sgd_steps = sum(stage.steps * stage.sgd_steps for stage in config.stages[: config.run.stage])
    if 0 < config.optimizer.decay_steps < sgd_steps:
        yield (
            f"optimizer.decay_steps = {config.optimizer.decay_steps} of up to {sgd_steps} SGD steps: the learning rate "
            "is 0 after them, and nothing is trained"
        )
    yield from _sampling_warnings(config)
    for stage in config.stages:
        if stage.sgd_steps >= 4 and config.algorithm.entropy.mode == "adaptive":
            yield (
                f"stage '{stage.name}': N_SGD = {stage.sgd_steps} with adaptive entropy control: entropy was seen to "
                "become unstable from 4 on; 1 or 2 is stable"
            )
        if (most := micro_batches(config, stage)) < config.parallel.pipeline:
            yield (
                f"stage '{stage.name}': at most {most} micro-batches for {config.parallel.pipeline} pipeline stages: "
                "some stages idle; lower micro_batch_tokens"
            )


def _sampling_warnings(config: Config) -> Iterator[str]:
    loss = config.algorithm.loss
    if config.algorithm.objective.name == "gspo" and max(loss.clip_low, loss.clip_high) >= 0.1:
        yield (
            f"algorithm.loss.clip_low = {loss.clip_low:g} and clip_high = {loss.clip_high:g} with gspo: a response's "
            "ratio is a geometric mean, which hardly moves, so they clip nothing; the paper has 3e-4 and 4e-4"
        )
    if config.algorithm.objective.name == "cispo" and loss.clip_low < 1:
        yield (
            f"algorithm.loss.clip_low = {loss.clip_low:g} with cispo: its paper has no lower bound of the ratio; 1 "
            "switches it off"
        )
    for stage in config.stages:
        why = "refill_prompts" if stage.refill_prompts else "plateau" if stage.plateau is not None else None
        if why is not None and config.rollout.max_staleness > 1:
            yield (
                f"stage '{stage.name}': rollout.max_staleness = {config.rollout.max_staleness} works as 1, because "
                f"with {why} only the next step is known ahead"
            )
    stale = config.rollout.max_staleness and config.algorithm.correction.mode == "off"
    for stage in config.stages:
        if stage.sgd_steps == 1 and not stale and loss.clip_low != loss.clip_high:
            yield (
                f"stage '{stage.name}': N_SGD = 1, where the ratio is 1: clip_low = {loss.clip_low:g} and clip_high = "
                f"{loss.clip_high:g} have no effect"
            )
        if stage.top_p < 1:
            yield (
                f"stage '{stage.name}': top_p = {stage.top_p:g}: responses are drawn from the nucleus, but log-probs, "
                "ratios and entropies are of the whole distribution; the gradient is biased"
            )


def _problem_warnings(config: Config, problems: Sequence[int]) -> Iterator[str]:
    for stage in config.stages:
        spare = within_reach(config, stage, problems) - stage.prompts_per_step
        if stage.refill_prompts > spare:
            yield (
                f"stage '{stage.name}': refill_prompts = {stage.refill_prompts}, but there are {spare} problems beyond "
                f"prompts_per_step = {stage.prompts_per_step}; no more than those can be drawn"
            )
