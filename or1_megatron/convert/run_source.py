"""Reads what a run's folder says about one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder, step_of


@dataclass(frozen=True, slots=True)
class RunOf:
    """The run of a checkpoint."""

    step: int
    config: Config
    base: Path | None
    """An HF folder with the model's config and tokenizer: the run's base model or its export; None if both are gone."""
    metrics: Mapping[str, Any]
    """The step's row of metrics."""
    evaluation: tuple[int, Mapping[str, Any]] | None
    """The last evaluation up to the step: (its step, its row)."""


def run_of(checkpoint: Path) -> RunOf | None:
    """Return the run of ``<run>/checkpoints/step_N``; None for a checkpoint in another place."""
    checkpoint = checkpoint.resolve()  # best is a link
    folder = RunFolder(checkpoint.parents[1])
    step = step_of(checkpoint)
    if step is None or not folder.config.is_file():
        return None
    config = load_config(folder.config)
    steps = read_steps(folder.metrics) if folder.metrics.is_file() else {}
    evaluated = {at: row for at, row in steps.items() if at <= step and "evaluation/accuracy" in row}
    candidates = (config.model.hf, folder.hf)
    return RunOf(
        step,
        config,
        next((path for path in candidates if (path / "config.json").is_file()), None),
        steps.get(step, {}),
        max(evaluated.items(), default=None, key=lambda item: item[0]),
    )
