"""Reads the records of run folders (metrics, rollouts, configuration, sessions) for the HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from or1_megatron.report.page.rollout_table import read_table
from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.jsonl import read_rows, read_steps
from or1_megatron.runtime.rollout_store import open_rollouts, rollout_files
from or1_megatron.runtime.run_folder import RunFolder, find_run, step_of

ROWS = 250_000
"""A page lists about this many responses of each rollout folder of a run. If a folder has more responses, the page
lists only the responses of every n-th step."""
_SUMMARY = ("steps", "total_steps", "finished", "seed", "wall_s", "accuracy_before", "accuracy_after", "other_share")
"""Fields of summary.json that the page shows."""


@dataclass(frozen=True)
class PageRun:
    """The records of one run. ``rows``: table of its responses without texts; ``files``: rollout files with texts."""

    label: str
    path: Path
    metrics: Mapping[int, Mapping[str, float | None]]
    """Metrics by step and name; None for a value that is not finite. A step that a resumed run repeats appears once."""
    files: Sequence[Path]
    rows: pd.DataFrame
    model: Path | None
    """The HF folder of the model that the run started from, as configured."""
    facts: Mapping[str, Any]
    """Other data that the page shows: stages, config, alarms, faults, summary, sessions."""
    notes: list[str] = field(default_factory=list)


def read_page_runs(runs: Sequence[Path], steps: Collection[int] = ()) -> list[PageRun]:
    """Return the records of runs in order, each run once and with a label. Responses of ``steps`` are never left out.

    Raises:
        FileNotFoundError: a path is not a run folder.
        ValueError: a line of metrics is not a JSON object, or no run has recorded anything yet.
    """
    folders: list[Path] = []
    for run in runs:
        if (run / "responses.jsonl").is_file() and not RunFolder(run).config.exists():
            raise FileNotFoundError(f"{run} holds an evaluation; or1 eval has written its figure and results there")
        find_run(run)
        if not any(run.samefile(other) for other in folders):  # a shell pattern and a name may give one run twice
            folders.append(run)
    named = zip(folders, labels(folders), strict=True)
    records = [read_page_run(run, label, steps=steps) for run, label in named]
    if not any(record.metrics or len(record.rows) for record in records):
        raise ValueError(f"{', '.join(map(str, folders))}: nothing to show yet, neither metrics nor rollouts")
    return records


def read_page_run(
    run: Path, label: str, metrics: Any = None, files: Sequence[Path] | None = None, steps: Collection[int] = ()
) -> PageRun:
    """Return the records of a run folder. Files that cannot be read are left out, and named in the records' ``notes``.

    ``metrics``: the metrics, if already read. ``files``: the rollout files whose responses to read. None: all files,
    or, if they have too many responses, every n-th file and the files of ``steps``.
    """
    folder, notes = RunFolder(run), list[str]()
    config = _document(folder.config, yaml.safe_load, notes)
    if metrics is None:
        metrics = read_steps(folder.metrics) if folder.metrics.is_file() else {}
    if files is None:
        kept = [rollout_files(place) for place in (folder.rollouts, folder.evaluations)]
        listed = {path for its in kept for path in spread(its, ROWS)}
        files = [path for its in kept for path in its if path in listed or step_of(path) in steps]
        if len(files) < (every := sum(map(len, kept))):
            notes.append(f"responses of {len(files):,} of {every:,} files are listed and counted, those of every n-th")
        if partial := sorted(path.name for path in folder.rollouts.glob(f"*{PARTIAL_SUFFIX}")):
            notes.append(f"{', '.join(partial)}: half-written, left out (the run still writes it, or was killed)")
        if not files:
            notes.append("no rollouts are kept: there is nothing to browse, and no histogram")
    rows = read_table(files, notes)
    model = (config.get("model") or {}).get("hf")
    alarms, sessions = (
        list(read_rows(path, bad_lines=[])) if path.is_file() else [] for path in (folder.alarms, folder.sessions)
    )
    summary = _document(folder.summary, json.loads, notes)
    facts = {
        "stages": _stages(config, metrics),
        "config": config,
        "alarms": alarms,
        "sessions": sessions,
        "faults": [astuple(fault) for fault in FaultRecord(run).read()],
        "summary": {name: summary[name] for name in _SUMMARY if name in summary},
    }
    return PageRun(label, run, metrics, files, rows, None if model is None else Path(model), facts, notes)


def _document(path: Path, load: Callable[[str], Any], notes: list[str]) -> Mapping[str, Any]:
    """Return a file's content, or {} without the file. An unreadable file gives {} too, and a sentence in ``notes``."""
    try:
        found = (load(path.read_text()) or {}) if path.is_file() else {}
        if isinstance(found, dict):
            return found
        raise ValueError("it holds no mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} is left out: {' '.join(str(error).split())}")
        return {}


def spread(files: Sequence[Path], rows: int) -> Sequence[Path]:
    """Return every n-th rollout file, counted back from the newest. Together they have about ``rows`` responses."""
    each = 1
    with suppress(OSError, ValueError, IndexError):
        each = max(1, open_rollouts(files[-1]).metadata.num_rows)
    return files[:: -len(files) // max(1, rows // each) or 1][::-1]


def labels(folders: Sequence[Path]) -> list[str]:
    """Return folders' paths without their common beginning: a/one, a/two become one, two; a/run, b/run stay."""
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, common) for path in paths]


def _stages(config: Mapping[str, Any], metrics: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, int, int | None]]:
    """Return (name, first step with metrics, most response tokens T) of each stage that has begun, in order."""
    firsts: dict[int, int] = {}
    for step, row in metrics.items():
        if (index := row.get("stage/index")) is not None:
            firsts.setdefault(int(index), step)
    listed = enumerate(config.get("stages") or ())
    return [(one["name"], firsts[i], one.get("max_response_tokens")) for i, one in listed if i in firsts]
