"""The runs of an ablation: one per arm and seed. Finished runs are never repeated.

A run's folder is OUT/runs/KEY_seed_S, where KEY is the digest of the arm's configuration. So an arm that two ablations
share runs only once. The metrics of a finished run are copied to a small file, KEPT/KEY_seed_S.json. Even without the
run's folder (deleted, or on another machine) this file suffices to write pages and not to repeat the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.ablate.ablation import Arm
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder
from or1_verify.child_process import die_with_parent


@dataclass(frozen=True, slots=True)
class ArmRun:
    arm: Arm
    seed: int
    dir: Path
    kept: Path
    """The file with the metrics of the finished run."""

    @property
    def finished(self) -> bool:
        if self.kept.is_file():
            return True
        try:
            return bool(RunFolder(self.dir).read_summary()["finished"])
        except (FileNotFoundError, ValueError, KeyError):
            return False

    @property
    def log(self) -> Path:
        return self.dir.with_suffix(".log")

    def command(self) -> list[str]:
        """Return the command that starts or resumes the run."""
        overrides = [*self.arm.overrides, f"run.dir={self.dir}", f"run.seed={self.seed}"]
        sets = [part for override in overrides for part in ("--set", override)]
        return [sys.executable, "-m", "or1_megatron.commands.app", "train", str(self.arm.base), *sets]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics, one per step, in order. If the run is kept, rows have only the kept metrics."""
        if self.kept.is_file():
            columns = json.loads(self.kept.read_text())["metrics"]
            rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
            return [{name: value for name, value in row.items() if value is not None} for row in rows]
        metrics = RunFolder(self.dir).metrics
        return list(read_steps(metrics).values()) if metrics.is_file() else []

    def keep(self, metrics: Sequence[str]) -> None:
        """Write the run's metrics in ``metrics`` to the file ``kept``, unless it exists or the run is unfinished."""
        if self.kept.is_file() or not self.finished:
            return
        rows = self.rows()
        columns = {name: [_six_digits(row.get(name)) for row in rows] for name in metrics}
        whole = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        described = {"arm": self.arm.name, "seed": self.seed, "set": list(self.arm.overrides), "metrics": whole}
        write_atomically(self.kept, (json.dumps(described) + "\n").encode(), "metrics of a finished run")


def _six_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def runs_of(arms: Sequence[Arm], seeds: Sequence[int], out: Path, kept: Path) -> list[ArmRun]:
    """Return the runs seed by seed, so that an interrupted ablation has all arms of its first seeds. ``kept``: folder
    for the files of metrics."""
    named = [(arm, seed, f"{arm.key}_seed_{seed}") for seed in seeds for arm in arms]
    return [ArmRun(arm, seed, out / "runs" / name, kept / f"{name}.json") for arm, seed, name in named]


def run_all(runs: Sequence[ArmRun], metrics: Sequence[str], at_once: int = 1) -> Iterator[tuple[ArmRun, int]]:
    """Run the runs that are not finished, in order; yield (run, exit status) when each ends, also if it failed.

    ``metrics``: the metrics to keep of finished runs. ``at_once``: how many runs share the machine. If this iterator is
    closed early, the runs get SIGTERM and save.
    """
    for run in runs:
        run.keep(metrics)
    waiting = [run for run in runs if not run.finished]
    running: dict[subprocess.Popen[bytes], ArmRun] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.pop(0)
                running[_start(run.command(), run.log)] = run
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                run.keep(metrics)
                yield run, process.returncode
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command, which gets SIGTERM if this process is killed."""
    parent = os.getpid()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
