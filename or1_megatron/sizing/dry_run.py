"""Makes the plan of a run from disk: reads the model's config.json and counts the problems in the data files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.config.base import DataFileMissing
from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import Config
from or1_megatron.data.problems import files_of, is_hub_id, is_saved, read_rows
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.run_plan import Plan, PlanError, plan
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape


def plan_run(config: Config, device: Device, shape: Path | None = None) -> Plan:
    """Return the plan of ``config``, for which the named model's config.json and problem files are read.

    Args:
        shape: a folder whose config.json replaces the model's; the problem files are then not read.

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
