"""Reads the records of run folders (metrics, rollouts, configuration, sessions) for the HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from or1_megatron.report.page.rollout_table import read_table
from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.jsonl import read_rows, read_steps
from or1_megatron.runtime.rollout_store import rollout_files
from or1_megatron.runtime.run_folder import RunFolder, find_run


@dataclass(frozen=True)
class Stage:
    """A stage that has begun. ``first_step``: the stage's first step in the metrics."""

    name: str
    first_step: int
    max_response_tokens: int


@dataclass(frozen=True)
class Recording:
    """The records of one run. ``rows``: table of its responses without texts; ``files``: rollout files with texts."""

    label: str
    path: Path
    metrics: Mapping[int, Mapping[str, float | None]]
    """Metrics by step and name; None for a value that is not finite. Steps that a resume repeats are there once."""
    stages: tuple[Stage, ...]
    files: Sequence[Path]
    rows: pd.DataFrame
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    alarms: Sequence[Mapping[str, Any]]
    sessions: Sequence[Mapping[str, Any]]
    """Time, host and code version of each session of the run."""
    model: Path | None
    """The HF folder of the model that the run started from, as configured."""
    notes: list[str] = field(default_factory=list)


def read_recordings(runs: Sequence[Path]) -> list[Recording]:
    """Return the records of runs in order, each run once and with a label of its own.

    Raises FileNotFoundError for a path that is not a run folder, ValueError for a line of metrics that is not a JSON
    object, or if no run has recorded anything yet.
    """
    folders: list[Path] = []
    for run in runs:
        if (run / "responses.jsonl").is_file() and not RunFolder(run).config.exists():
            raise FileNotFoundError(f"{run} holds an evaluation; or1 eval has written its figure and results there")
        find_run(run)
        if not any(run.samefile(other) for other in folders):  # a shell pattern and a name may give one run twice
            folders.append(run)
    recordings = [read_recording(run, label) for run, label in zip(folders, labels(folders), strict=True)]
    if not any(recording.metrics or len(recording.rows) for recording in recordings):
        raise ValueError(f"{', '.join(map(str, folders))}: nothing to show yet, neither metrics nor rollouts")
    return recordings


def read_recording(run: Path, label: str, metrics: Any = None, files: Sequence[Path] | None = None) -> Recording:
    """Return the records of a run folder, with its ``metrics`` if they are read already, and responses of ``files``, if
    not of all. Rollout files that cannot be read are left out, and named in its notes."""
    folder, notes = RunFolder(run), list[str]()
    config = (yaml.safe_load(folder.config.read_text()) or {}) if folder.config.is_file() else {}
    if metrics is None:
        metrics = read_steps(folder.metrics) if folder.metrics.is_file() else {}
    found = [*rollout_files(folder.rollouts), *rollout_files(folder.evaluations)] if files is None else files
    rows = read_table(found, notes)
    if files is None and (partial := sorted(path.name for path in folder.rollouts.glob(f"*{PARTIAL_SUFFIX}"))):
        notes.append(f"{', '.join(partial)}: half-written, left out (the run still writes it, or was killed)")
    if files is None and rows.empty:
        notes.append("no rollouts are kept or could be read: there is nothing to browse, and no histogram")
    model = config.get("model", {}).get("hf")
    return Recording(
        label=label,
        path=run,
        metrics=metrics,
        stages=_stages(config, metrics),
        files=found,
        rows=rows,
        config=config,
        alarms=list(read_rows(folder.alarms, bad_lines=[])) if folder.alarms.is_file() else [],
        sessions=list(read_rows(folder.sessions, bad_lines=[])) if folder.sessions.is_file() else [],
        summary=json.loads(folder.summary.read_text()) if folder.summary.is_file() else {},
        model=None if model is None else Path(model),
        notes=notes,
    )


def labels(folders: Sequence[Path]) -> list[str]:
    """Return folders' paths without their common beginning: a/one, a/two become one, two; a/run, b/run stay."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, common) for path in paths]


def _stages(config: Mapping[str, Any], metrics: Mapping[int, Mapping[str, float | None]]) -> tuple[Stage, ...]:
    """Return the stages of a run that have begun, in order."""
    firsts: dict[int, int] = {}
    for step, row in metrics.items():
        if (index := row.get("stage/index")) is not None:
            firsts.setdefault(int(index), step)
    listed = enumerate(config.get("stages", ()))
    return tuple(Stage(one["name"], firsts[i], one["max_response_tokens"]) for i, one in listed if i in firsts)
