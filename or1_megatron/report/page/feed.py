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
from or1_megatron.runtime.run_folder import RunFolder, find_run, step_of

MOST_POINTS: Final = 2000
"""Largest number of points of a curve."""
COUNTED_ROWS: Final = 20_000
"""About as many responses of a run are counted in histograms and pass rates, those of every n-th step."""
_LEVEL: Final = 1  # of compression: the page is on this machine or near


class Feed:
    """Answers the page's questions with packets. Threads may ask at once. Each method raises FileNotFoundError when the
    folder of a run is gone, and LookupError for what is not there."""

    def __init__(self, runs: Sequence[Path], tokenizer: Path | None = None) -> None:
        """``tokenizer``: see ``run_page.write_report``. Raises FileNotFoundError for a path that is no run folder."""
        self._folders = [find_run(run) for run in runs]
        self._labels = labels(runs)
        self._steps = [GrowingSteps(folder.metrics) for folder in self._folders]
        self._tokenizer = tokenizer
        self._reading = Lock()
        self._read_rows = lru_cache(2)(self._read_rows)  # type: ignore[method-assign]

    def page(self) -> bytes:
        return html(self._labels, {}, command="watch").encode()

    def answer(self, name: str, asked: Mapping[str, str]) -> bytes | None:
        """Return the packet that ``web/data.js`` asks for by ``name`` with these parameters; None: nothing is new.

        head: curves and facts, unless ``version`` is the newest. counts: the same with histograms and pass rates.
        rows: the responses of ``step``, or of the newest step. text: the response ``row`` of ``step`` in full.
        """
        for folder in self._folders:
            if not folder.root.is_dir():
                raise FileNotFoundError(f"the run folder {folder.root} is gone")
        if name == "head":
            return self._head(asked.get("version", ""))
        if name == "counts":
            return self._counts()
        if name == "rows":
            return self._rows(int(asked["step"]) if "step" in asked else None)
        if name == "text":
            recordings, table = self._read_rows(*self._files_of(int(asked["step"])))
            row = int(asked["row"])
            return text_packets(recordings, table.loc[[row]], self._tokenizer, [])[row]
        raise LookupError(f"nothing is called {name}")

    def _head(self, known: str) -> bytes | None:
        version = "-".join(str(stamp) for folder in self._folders for stamp in _stamps(folder))
        if version == known:
            return None
        kept = [len(rollout_files(folder.rollouts)) for folder in self._folders]
        recordings = self._recordings([[] for _ in self._folders])
        return self._packet(recordings, {"version": version, "kept": kept})

    def _counts(self) -> bytes:
        counted = [_spread(rollout_files(folder.rollouts)) for folder in self._folders]
        return self._packet(self._recordings(counted), {"counted": [len(files) for files in counted]})

    def _packet(self, recordings: Sequence[Recording], more: Mapping[str, object]) -> bytes:
        table = join([recording.rows for recording in recordings])
        more = {**more, "problems": table["problem"].cat.categories.tolist()}
        return head_packet(recordings, table, more, MOST_POINTS, level=_LEVEL)

    def _rows(self, step: int | None) -> bytes:
        kept = [[step_of(path) or 0 for path in rollout_files(folder.rollouts)] for folder in self._folders]
        steps = sorted(set().union(*kept))
        at = next((its[-1] for its in kept if its), None) if step is None else step
        recordings, table = self._read_rows(*self._files_of(at))
        notes = [note for recording in recordings for note in recording.notes]
        return rows_packet(
            table, table, table.index.tolist(), {"steps": steps, "step": at, "notes": notes}, level=_LEVEL
        )

    def _files_of(self, step: int | None) -> list[tuple[Path, int] | None]:
        """Return each run's file of a step, with its time of writing, if there is one."""
        files = [
            next((path for path in rollout_files(folder.rollouts) if step_of(path) == step), None)
            for folder in self._folders
        ]
        return [None if path is None else (path, path.stat().st_mtime_ns) for path in files]

    def _read_rows(self, *files: tuple[Path, int] | None) -> tuple[list[Recording], pd.DataFrame]:
        recordings = self._recordings([[] if file is None else [file[0]] for file in files])
        return recordings, join([recording.rows for recording in recordings])

    def _recordings(self, files: Sequence[Sequence[Path]]) -> list[Recording]:
        with self._reading:
            metrics = [steps.read() for steps in self._steps]
        return [
            read_recording(folder.root, *its)
            for folder, *its in zip(self._folders, self._labels, metrics, files, strict=True)
        ]


def _stamps(folder: RunFolder) -> list[int]:
    """Return numbers that differ when anything was written to a run folder that the page's head shows."""
    paths = (folder.metrics, folder.rollouts, folder.summary, folder.sessions, folder.root / "faults.jsonl")
    stats = [path.stat() for path in paths if path.exists()]
    return [number for stat in stats for number in (stat.st_mtime_ns, stat.st_size)]


def _spread(files: Sequence[Path]) -> Sequence[Path]:
    """Return every n-th file, from the newest on, so that they have about ``COUNTED_ROWS`` rows."""
    if not files:
        return files
    with open_rollouts(files[-1]) as newest:
        most = max(1, COUNTED_ROWS // max(1, newest.metadata.num_rows))
    return files[:: -1][:: -(-len(files) // most)][::-1]
