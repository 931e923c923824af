"""Feeds the page of ``or1 watch``: reads what the page asks for from the run folders, when it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

import pandas as pd

from or1_megatron.report.page.recordings import Recording, labels, read_recording
from or1_megatron.report.page.rollout_table import join
from or1_megatron.report.page.run_page import head_packet, html, rows_packet, text_packets
from or1_megatron.runtime.jsonl import GrowingSteps
from or1_megatron.runtime.rollout_store import open_rollouts, rollout_files
from or1_megatron.runtime.run_folder import find_run, step_of

COUNTED_ROWS: Final = 20_000  # about as many responses of a run are counted: those of every n-th step


class Feed:
    """Answers the page's questions with packets. Threads may ask at once."""

    def __init__(self, runs: Sequence[Path]) -> None:
        """Raises FileNotFoundError for a path that is no run folder."""
        self._folders, self._labels = [find_run(run) for run in runs], labels(runs)
        self._steps = [GrowingSteps(folder.metrics) for folder in self._folders]
        self._reading = Lock()
        self._rows = lru_cache(2)(self._read)
        self._read(*((),) * len(runs))  # so that the first page waits for less

    def answer(self, name: str, asked: Mapping[str, str]) -> bytes | None:
        """Return the page (/), or the packet that it asks for by path and parameters; None: nothing is new.

        /data/head: facts and curves, unless ``version`` is the newest. counts: the same with histograms and pass rates.
        rows: the responses of ``step``, or of the newest. text: response ``row`` of ``step`` in full.
        Raises FileNotFoundError when a run's folder is gone, LookupError or ValueError for what is not there.
        """
        if name == "/":
            return html(self._labels, {}).encode()
        if gone := [str(folder.root) for folder in self._folders if not folder.root.is_dir()]:
            raise FileNotFoundError(f"the run folder {gone[0]} is gone")
        shown = [
            (run.metrics, run.rollouts, run.summary, run.sessions, run.alarms, run.root / "faults.jsonl")
            for run in self._folders
        ]
        stats = [path.stat() for paths in shown for path in paths if path.exists()]
        version = "-".join(f"{stat.st_mtime_ns}-{stat.st_size}" for stat in stats)
        if name == "/data/head" and asked.get("version") == version:
            return None
        kept = [rollout_files(folder.rollouts) for folder in self._folders]
        if name in ("/data/head", "/data/counts"):
            counted: list[Sequence[Path]] = [[] if name == "/data/head" else _spread(files) for files in kept]
            recordings, table = self._read(*(tuple((path, 0) for path in files) for files in counted))
            facts = {"version": version, "kept": list(map(len, kept)), "counted": list(map(len, counted))}
            problems = table["problem"].cat.categories.tolist()
            return head_packet(recordings, table, {**facts, "problems": problems}, most=2000)
        newest = next((step_of(files[-1]) for files in kept if files), None)
        step = int(asked["step"]) if "step" in asked else newest
        of_step = [[path for path in files if step_of(path) == step] for files in kept]
        recordings, table = self._rows(*(tuple((path, path.stat().st_mtime_ns) for path in its) for its in of_step))
        if name == "/data/text":
            return next(iter(text_packets(recordings, table.loc[[int(asked["row"])]], None, []).values()))
        if name != "/data/rows":
            raise LookupError(f"nothing is called {name}")
        steps = sorted({step_of(path) or 0 for files in kept for path in files})
        notes = [note for recording in recordings for note in recording.notes]
        return rows_packet(table, table, table.index.tolist(), {"steps": steps, "step": step, "notes": notes})

    def _read(self, *files: tuple[tuple[Path, int], ...]) -> tuple[list[Recording], pd.DataFrame]:
        """Return the runs' records with the responses of these files of each run, which have their times of writing."""
        with self._reading:
            told = zip(self._folders, self._labels, [steps.read() for steps in self._steps], files, strict=True)
        found = [read_recording(run.root, label, rows, [path for path, _ in its]) for run, label, rows, its in told]
        return found, join([recording.rows for recording in found])


def _spread(files: Sequence[Path]) -> Sequence[Path]:
    """Return every n-th file, the newest among them, so that they have about ``COUNTED_ROWS`` rows."""
    rows = max([1, *(open_rollouts(newest).metadata.num_rows for newest in files[-1:])])
    return files[:: -len(files) // max(1, COUNTED_ROWS // rows) or 1][::-1]
