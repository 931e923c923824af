"""Feeds the page of ``or1 watch``: reads what the page asks for from the run folders, when it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Final

import pandas as pd

from or1_megatron.report.page.recordings import Recording, labels, read_recording
from or1_megatron.report.page.rollout_table import join
from or1_megatron.report.page.run_page import behaviours, head_packet, html, rows_packet, text_packets
from or1_megatron.runtime.jsonl import GrowingSteps
from or1_megatron.runtime.rollout_store import open_rollouts, rollout_files
from or1_megatron.runtime.run_folder import find_run, step_of

COUNTED_ROWS: Final = 20_000  # about as many responses of a run are counted: those of every n-th step


class Feed:
    """Answers the page's questions with packets. Threads may ask at once."""

    def __init__(self, runs: Sequence[Path], tokenizer: Path | None = None) -> None:
        """``tokenizer``: as for ``write_report``. Raises FileNotFoundError for a path that is no run folder."""
        self._folders, self._labels, self._tokenizer = [find_run(run) for run in runs], labels(runs), tokenizer
        self._steps = [GrowingSteps(folder.metrics) for folder in self._folders]
        self._reading = Lock()
        self._rows = lru_cache(4)(self._read)
        self._read(*((),) * len(runs))  # so that the first page waits for less

    def answer(self, name: str, asked: Mapping[str, str]) -> bytes | None:
        """Return the page (/), or the packet that it asks for by path and parameters; None: nothing is new.

        /data/head: facts and curves, unless ``version`` is the newest, and the names of the rollout files (``kept``),
        such as 0/rollouts/12 and 1/evaluations/8 (run, folder, step). rows: the responses in the files ``of``. text:
        their response ``row`` in full. counts: the responses of every n-th step, with their behaviour.
        Raises FileNotFoundError when a run's folder is gone, LookupError or ValueError for what is not there.
        """
        if name == "/":
            return html(self._labels, {}).encode()
        if gone := [str(folder.root) for folder in self._folders if not folder.root.is_dir()]:
            raise FileNotFoundError(f"the run folder {gone[0]} is gone")
        kept = {
            f"{run}/{place.name}/{step_of(path)}": path
            for run, folder in enumerate(self._folders)
            for place in (folder.rollouts, folder.evaluations)
            for path in rollout_files(place)
        }
        if name == "/data/head":
            return self._head(list(kept), asked.get("version"))
        if name == "/data/counts":
            places = groupby(kept, lambda key: key.rpartition("/")[0])
            wanted = {key for _, keys in places for key in _spread(list(keys), kept)}
        else:
            wanted = {key for key in asked.get("of", "").split(",") if key}
        if missing := wanted - kept.keys():
            raise LookupError(f"the responses {min(missing)} are not kept (any more)")
        of_runs = [[kept[key] for key in kept if key in wanted and key.startswith(f"{run}/")] for run in range(len(self._folders))]
        recordings, table = self._rows(*(tuple((path, path.stat().st_mtime_ns) for path in its) for its in of_runs))
        if name == "/data/text":
            row = table.loc[[int(asked["row"])]]
            return next(iter(text_packets(recordings, row, self._tokenizer, []).values()))
        if name not in ("/data/rows", "/data/counts"):
            raise LookupError(f"nothing is called {name}")
        more = {"notes": [note for recording in recordings for note in recording.notes]}
        counted = {"behaviour": behaviours(recordings, table, self._tokenizer)} if name == "/data/counts" else {}
        return rows_packet(table, table, table.index.tolist(), more | counted)

    def _head(self, kept: Sequence[str], known: str | None) -> bytes | None:
        shown = [
            (run.metrics, run.rollouts, run.evaluations, run.summary, run.sessions, run.alarms, run.root / "faults.jsonl")
            for run in self._folders
        ]
        stats = [path.stat() for paths in shown for path in paths if path.exists()]
        version = "-".join(f"{stat.st_mtime_ns}-{stat.st_size}" for stat in stats)
        if known == version:
            return None
        recordings, _ = self._read(*((),) * len(self._folders))
        return head_packet(recordings, {"version": version, "kept": kept}, most=2000)

    def _read(self, *files: tuple[tuple[Path, int], ...]) -> tuple[list[Recording], pd.DataFrame]:
        """Return the runs' records with the responses of these files of each run, which have their times of writing."""
        with self._reading:
            told = zip(self._folders, self._labels, [steps.read() for steps in self._steps], files, strict=True)
        found = [read_recording(run.root, label, rows, [path for path, _ in its]) for run, label, rows, its in told]
        return found, join([recording.rows for recording in found])


def _spread(keys: Sequence[str], kept: Mapping[str, Path]) -> Sequence[str]:
    """Return every n-th of the files ``keys``, the newest among them, so that they have about ``COUNTED_ROWS`` rows."""
    rows = max(1, open_rollouts(kept[keys[-1]]).metadata.num_rows)
    return keys[:: -len(keys) // max(1, COUNTED_ROWS // rows) or 1][::-1]
