"""Feeds the page of ``or1 watch`` with data: answers each request of the page from the run folders.

The page lists faults that the run has recorded; whether a process stalls is decided by ``runtime.watchdog``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Final

import pandas as pd

from or1_megatron.report.page.rollout_table import join
from or1_megatron.report.page.run_page import behaviours, head_packet, html, rows_packet, text_packets
from or1_megatron.report.page.run_records import PageRun, labels, read_page_run, spread
from or1_megatron.runtime.jsonl import GrowingSteps
from or1_megatron.runtime.rollout_store import rollout_files
from or1_megatron.runtime.run_folder import find_run, step_of

COUNTED_ROWS: Final = 20_000  # about as many responses of a run are counted: those of every n-th step
_SHOWN: Final = ("*.json", "*.jsonl", "rollouts", "evaluations")  # what changes in a run's folder when the page does


class Feed:
    """Answers the requests of the page with packets (``encoding``). Several threads may call it at once."""

    def __init__(self, runs: Sequence[Path], tokenizer: Path | None = None) -> None:
        """``tokenizer``: as for ``write_report``. Raises FileNotFoundError for a path that is no run folder."""
        self._folders, self._labels, self._tokenizer = [find_run(run) for run in runs], labels(runs), tokenizer
        self._steps = [GrowingSteps(folder.metrics) for folder in self._folders]
        self._reading = Lock()
        self._rows = lru_cache(4)(self._read)
        self._read(*((),) * len(runs))  # so that the first page waits for less

    def answer(self, name: str, asked: Mapping[str, str]) -> bytes | None:
        """Return the page for the path ``/``, or a packet for the paths below; ``asked`` has the request's parameters.

        /data/head: facts, curves and ``kept``, the names of the rollout files. A name is run/folder/step, such as
        0/rollouts/12 or 1/evaluations/8. The answer is None if the parameter ``version`` is the newest version.
        /data/rows: the responses in the files that the parameter ``of`` names. /data/text: the response ``row`` of
        these files, in full. /data/counts: the responses of every n-th step, with their behaviour.

        Raises:
            FileNotFoundError: a run's folder is gone.
            LookupError: the path, a parameter or a response does not exist.
            ValueError: a parameter is not a number, or a file cannot be read.
        """
        if name == "/":
            return html(self._labels, {}).encode()
        if gone := [str(folder.root) for folder in self._folders if not folder.root.is_dir()]:
            raise FileNotFoundError(f"the run folder {gone[0]} is gone")
        files = [(rollout_files(folder.rollouts), rollout_files(folder.evaluations)) for folder in self._folders]
        kept = {
            f"{run}/{path.parent.name}/{step_of(path)}": path for run, both in enumerate(files) for path in chain(*both)
        }
        if name == "/data/head":
            parts = [run.root.glob(each) for run in self._folders for each in _SHOWN]
            version = "-".join(
                f"{stat.st_mtime_ns}-{stat.st_size}" for stat in map(Path.stat, chain(*map(sorted, parts)))
            )
            if asked.get("version") == version:
                return None
            return head_packet(self._read(*((),) * len(files))[0], {"version": version, "kept": list(kept)}, most=2000)
        wanted = {key for key in asked.get("of", "").split(",") if key}
        if missing := wanted - kept.keys():
            raise LookupError(f"the responses {min(missing)} are not kept (any more)")
        if name == "/data/counts":
            chosen = [[path for its in both for path in spread(its, COUNTED_ROWS)] for both in files]
        else:
            chosen = [
                [kept[key] for key in kept if key in wanted and key.startswith(f"{i}/")] for i in range(len(files))
            ]
        records, table = self._rows(*(tuple((path, path.stat().st_mtime_ns) for path in its) for its in chosen))
        if name == "/data/text":
            if (row := table[table.index == int(asked["row"])]).empty:
                raise LookupError("this response is not kept (any more)")
            return next(iter(text_packets(records, row, self._tokenizer, []).values()))
        if name not in ("/data/rows", "/data/counts"):
            raise LookupError(f"nothing is called {name}")
        more = {"notes": [note for record in records for note in record.notes]}
        counted = {"behaviour": behaviours(records, table, self._tokenizer)} if name == "/data/counts" else {}
        return rows_packet(table, table.index.tolist(), more | counted)

    def _read(self, *files: tuple[tuple[Path, int], ...]) -> tuple[list[PageRun], pd.DataFrame]:
        """Return the records of the runs, and the responses in the rollout ``files`` of each run. A file comes with the
        time of its last change, so that the cache reads a changed file again."""
        with self._reading:
            stored = zip(self._folders, self._labels, [steps.read() for steps in self._steps], files, strict=True)
        found = [read_page_run(run.root, label, rows, [path for path, _ in its]) for run, label, rows, its in stored]
        return found, join([record.rows for record in found])
