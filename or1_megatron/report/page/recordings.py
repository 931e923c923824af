"""The records of a run folder, read for the page. What cannot be read is left out and named in a note."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from or1_megatron.report.page.rollout_table import RolloutTable, gather
from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.jsonl import read_rows
from or1_megatron.runtime.rollout_store import rollout_files
from or1_megatron.runtime.run_folder import RunFolder, find_run

_SHOWN_FAULTS = 5
"""Faults of one kind that notes list; of further ones they give the number."""


@dataclass(frozen=True)
class Stage:
    """``first_step``: its first step in the metrics, or in the rollouts if there are no metrics."""

    name: str
    first_step: int
    max_response_tokens: int | None


@dataclass(frozen=True)
class Recording:
    """The records of one run. ``rows``: its responses without their texts."""

    label: str
    path: Path
    metrics: Mapping[int, Mapping[str, float | None]]
    """By step and name; None: not finite."""
    stages: tuple[Stage, ...]
    rows: RolloutTable
    summary: Mapping[str, Any]
    entropy_target: float | None
    model: Path | None
    """The HF folder of the model that it started from, as its configuration names it."""
    notes: list[str] = field(default_factory=list)


def read_recordings(runs: Sequence[Path]) -> list[Recording]:
    """Return the records of the runs in order, each run once and with a label of its own.

    Raises FileNotFoundError for a path that is not a run folder, ValueError if no run has recorded anything yet.
    """
    folders: list[Path] = []
    for run in runs:
        if (run / "responses.jsonl").is_file() and not RunFolder(run).config.exists():
            raise FileNotFoundError(f"{run} holds an evaluation; or1 eval has written its figure and results there")
        find_run(run)
        if not any(run.samefile(other) for other in folders):  # a pattern of the shell and a name may be the same
            folders.append(run)
    recordings = [read_recording(run, label) for run, label in zip(folders, labels(folders), strict=True)]
    if not any(recording.metrics or len(recording.rows) for recording in recordings):
        said = "; ".join(note for recording in recordings for note in recording.notes)
        raise ValueError(
            f"{', '.join(map(str, folders))}: nothing to show yet, neither metrics nor rollouts"
            + (f" ({said})" if said else "")
        )
    return recordings


def read_recording(run: Path, label: str) -> Recording:
    """Return the records of a run folder, whatever its files hold."""
    folder = RunFolder(run)
    notes: list[str] = []
    config = _read_mapping(
        folder.config, yaml.safe_load, notes, "stages have no names, and the entropy target is not known"
    )
    metrics = _read_metrics(folder.metrics, notes)
    files = rollout_files(folder.rollouts)
    rows = gather(files, notes)
    partial = sorted(path.name for path in folder.rollouts.glob(f"*{PARTIAL_SUFFIX}"))
    if partial:
        notes.append(f"{', '.join(partial)}: half-written, left out (the run still writes it, or was killed)")
    if not len(rows):
        notes.append(
            "no rollouts are kept: there is nothing to browse, and no histogram"
            if not files
            else "no rollout file could be read"
        )
    stages = _stages(config, metrics, rows)
    entropy = _section(_section(config, "algorithm"), "entropy")
    target = entropy.get("target") if entropy.get("mode") == "adaptive" else None
    model = _section(config, "model").get("hf")
    return Recording(
        label=label,
        path=run,
        metrics=metrics,
        stages=stages,
        rows=rows,
        summary=_read_mapping(folder.summary, json.loads, notes),
        entropy_target=float(target) if isinstance(target, int | float) else None,
        model=Path(model) if isinstance(model, str) else None,
        notes=notes,
    )


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names; equal names get as many parents as tell them apart.

    a/one and b/two become one and two; a/run and b/run stay a/run and b/run.
    """
    parts = [folder.resolve().parts for folder in folders]
    depths = [1] * len(parts)
    while True:
        found = ["/".join(each[-depth:]).replace("//", "/") for each, depth in zip(parts, depths, strict=True)]
        same = [i for i, label in enumerate(found) if found.count(label) > 1]
        if not same:
            return found
        for i in same:
            depths[i] += 1


def _read_mapping(path: Path, parse: Callable[[str], Any], notes: list[str], missing: str = "") -> Mapping[str, Any]:
    """Return the mapping in a file. If it cannot be read: an empty one, with a note (``missing`` if it is absent)."""
    try:
        found = parse(path.read_text())
    except FileNotFoundError:
        if missing:
            notes.append(f"{path.name} is missing: {missing}")
        return {}
    except (yaml.YAMLError, ValueError, OSError) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    return found if isinstance(found, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _read_metrics(path: Path, notes: list[str]) -> dict[int, dict[str, float | None]]:
    """Return the metrics by step, lines of one step merged. Only numbers are kept; None: not finite."""
    if not path.is_file():
        notes.append(f"{path.name} is missing: there are no curves and no times")
        return {}
    faults: list[str] = []
    steps: dict[int, dict[str, float | None]] = {}
    foreign: set[str] = set()
    for row in read_rows(path, faults):
        step = row.pop("step", None)
        if not _is_number(step) or step is None or not float(step).is_integer():
            faults.append(f"{path}: a row whose step is {step!r}, expected a whole number")
            continue
        numbers = {name: value for name, value in row.items() if _is_number(value)}
        foreign |= row.keys() - numbers.keys()
        finite = {
            name: None if value is None or not math.isfinite(value) else float(value) for name, value in numbers.items()
        }
        steps.setdefault(int(step), {}).update(finite)
    if foreign:
        faults.append(f"{path}: not numbers, and left out: {', '.join(sorted(foreign))}")
    notes += shortened(fault.replace(f"{path}:", f"{path.name}:", 1) for fault in faults)
    return dict(sorted(steps.items()))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _stages(
    config: Mapping[str, Any], metrics: Mapping[int, Mapping[str, float | None]], rows: RolloutTable
) -> tuple[Stage, ...]:
    """Return the stages in order of their steps: by ``stage/index`` of the metrics, else by names in the rollouts."""
    listed = config.get("stages")
    configured = [each if isinstance(each, dict) else {} for each in listed] if isinstance(listed, list) else []
    firsts: dict[int, int] = {}
    for step, row in metrics.items():
        index = row.get("stage/index")
        if index is not None:
            firsts.setdefault(int(index), step)
    found = [
        _stage(configured[index] if 0 <= index < len(configured) else {}, index, step) for index, step in firsts.items()
    ]
    if not found:
        names = [str(each.get("name")) for each in configured]
        for step, name, _ in rows.stages():
            index = names.index(name) if name in names else len(found)
            found.append(_stage((configured[index] if name in names else {}) | {"name": name}, index, step))
    return tuple(found)


def _stage(configured: Mapping[str, Any], index: int, first_step: int) -> Stage:
    tokens = configured.get("max_response_tokens")
    return Stage(
        str(configured.get("name") or f"stage {index + 1}"), first_step, tokens if isinstance(tokens, int) else None
    )


def shortened(faults: Iterable[str]) -> list[str]:
    """Return the first few, and how many more there are."""
    listed = list(faults)
    more = len(listed) - _SHOWN_FAULTS
    return listed[:_SHOWN_FAULTS] + ([f"... and {more} more such lines"] if more > 0 else [])
