"""The runs of an ablation: one per arm and seed. Finished runs are never repeated.

A run's folder is OUT/runs/KEY_seed_S, where KEY is the digest of the arm's configuration, so that arms which two
ablations share are run once. The metrics of a finished run are copied to a small file, KEPT/KEY_seed_S.json, which is
enough for pages and for not repeating the run, after its folder is gone or on another machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from or1_megatron.ablate.ablation import Arm, Arms
from or1_megatron.ablate.spent import Spent
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
    """The file of its metrics."""

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
        """Return the command that starts or resumes it."""
        overrides = [*self.arm.overrides, f"run.dir={self.dir}", f"run.seed={self.seed}"]
        sets = [part for override in overrides for part in ("--set", override)]
        return [sys.executable, "-m", "or1_megatron.commands.app", "train", str(self.arm.base), *sets]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics, one per step, in order; of a kept run with the metrics that are kept."""
        if self.kept.is_file():
            columns = json.loads(self.kept.read_text())["metrics"]
            rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
            return [{name: value for name, value in row.items() if value is not None} for row in rows]
        metrics = RunFolder(self.dir).metrics
        return list(read_steps(metrics).values()) if metrics.is_file() else []

    def keep(self, metrics: Sequence[str]) -> None:
        """Write the file of its metrics, those of ``metrics`` that it has; nothing if it is there or not finished."""
        if self.kept.is_file() or not self.finished:
            return
        rows = self.rows()
        columns = {name: [_rounded(row.get(name)) for row in rows] for name in metrics}
        whole = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        described = {"arm": self.arm.name, "seed": self.seed, "set": list(self.arm.overrides), "metrics": whole}
        write_atomically(self.kept, (json.dumps(described) + "\n").encode(), "metrics of a finished run")


def _rounded(value: float | None) -> float | None:
    """Return the value with six digits."""
    return None if value is None else float(f"{value:.6g}")


def runs_of(arms: Sequence[Arm], seeds: Sequence[int], out: Path, kept: Path | None = None) -> list[ArmRun]:
    """Return the runs seed by seed, so that an interrupted ablation has whole rounds.

    ``kept``: the folder of their metrics; None: OUT/kept.
    """
    named = [(arm, seed, f"{arm.key}_seed_{seed}") for seed in seeds for arm in arms]
    return [
        ArmRun(arm, seed, out / "runs" / name, (kept or out / "kept") / f"{name}.json") for arm, seed, name in named
    ]


def entry_runs(chosen: Arms, arms: Sequence[Arm], out: Path, kept: Path | None = None) -> list[ArmRun]:
    """Return the runs that measure the conditions of entry: one for each arm that a condition names."""
    named = {condition.arm for condition in chosen.entry}
    return runs_of([arm for arm in arms if arm.name in named], (chosen.entry_seed,), out, kept)


def run_all(
    runs: Sequence[ArmRun], spent: Spent, metrics: Sequence[str] = (), at_once: int = 1
) -> Iterator[tuple[ArmRun, int]]:
    """Run what is not finished, in order, and yield (run, exit status) as each ends, failed ones too.

    Once the budget is used up no further run begins. ``metrics``: those that are kept of a finished run. ``at_once``:
    how many runs share the machine.
    """
    by_name = {run.dir.name: run for run in runs}

    def unfinished() -> Iterator[CampaignJob]:
        for name, run in by_name.items():
            run.keep(metrics)
            if run.finished:
                continue
            if spent.used_up:
                return
            run.dir.parent.mkdir(parents=True, exist_ok=True)
            described = {"arm": run.arm.name, "seed": run.seed, "set": list(run.arm.overrides)}
            (run.dir.parent / f"{name}.json").write_text(json.dumps(described, indent=2) + "\n")
            yield CampaignJob(name, run.command(), run.log)

    for job, status in run_jobs(unfinished(), spent, at_once):
        by_name[job.name].keep(metrics)
        yield by_name[job.name], status


@dataclass(frozen=True, slots=True)
class CampaignJob:
    name: str
    command: list[str]
    log: Path


def run_jobs(jobs: Iterable[CampaignJob], spent: Spent, at_once: int = 1) -> Iterator[tuple[CampaignJob, int]]:
    """Run the jobs, ``at_once`` at a time, and yield (job, exit status) as each ends; the next is taken when one ends.

    On SIGTERM no further job begins, and the running ones get the signal, save and end; then this process ends.
    """
    received: list[int] = []
    running: dict[subprocess.Popen[bytes], CampaignJob] = {}
    waiting = iter(jobs)
    seconds: dict[str, float] = {}  # of each that runs: those that pass are shared
    shared_s = time.monotonic()

    def share() -> None:
        nonlocal shared_s
        now_s = time.monotonic()
        for job in running.values():
            seconds[job.name] = seconds.get(job.name, 0.0) + (now_s - shared_s) / len(running)
        shared_s = now_s

    def ended(process: subprocess.Popen[bytes]) -> CampaignJob:
        job = running.pop(process)
        spent.add(job.name, seconds.pop(job.name, 0.0))
        return job

    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        while not received:
            while len(running) < at_once and (job := next(waiting, None)) is not None:
                running[_start(job)] = job
            if not running:
                return
            time.sleep(0.1)
            share()
            for process in [process for process in running if process.poll() is not None]:
                yield ended(process), process.returncode
        raise SystemExit(128 + received[0])
    finally:  # also Ctrl-C, which the jobs receive too
        for process in running:
            process.terminate()
        for process in list(running):
            process.wait()
            share()
            ended(process)
        signal.signal(signal.SIGTERM, previous)


def _start(job: CampaignJob) -> subprocess.Popen[bytes]:
    """Start the job. It gets SIGTERM if this process is killed, and finds this environment's programs before others."""
    parent, path = os.getpid(), f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        return subprocess.Popen(
            job.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path},
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
