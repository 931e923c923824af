"""The runs of an ablation: one per arm and seed. Finished runs are never repeated.

A run's folder is OUT/runs/KEY_seed_S, where KEY is the digest of the arm's configuration, so that arms which two
ablations share are run once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from or1_megatron.ablate.ablation import Arm, Arms
from or1_megatron.ablate.spent import Spent
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.signals import die_with_parent


@dataclass(frozen=True, slots=True)
class ArmRun:
    arm: Arm
    seed: int
    dir: Path

    @property
    def finished(self) -> bool:
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
        """Return the rows of metrics, one per step, in order."""
        metrics = RunFolder(self.dir).metrics
        return list(read_steps(metrics).values()) if metrics.is_file() else []


def runs_of(arms: Sequence[Arm], seeds: Sequence[int], out: Path) -> list[ArmRun]:
    """Return the runs seed by seed, so that an interrupted ablation has whole rounds."""
    return [ArmRun(arm, seed, out / "runs" / f"{arm.key}_seed_{seed}") for seed in seeds for arm in arms]


def entry_runs(chosen: Arms, arms: Sequence[Arm], out: Path) -> list[ArmRun]:
    """Return the runs that measure the conditions of entry: one for each arm that a condition names."""
    named = {condition.arm for condition in chosen.entry}
    return runs_of([arm for arm in arms if arm.name in named], (chosen.entry_seed,), out)


def run_all(runs: Sequence[ArmRun], spent: Spent) -> Iterator[tuple[ArmRun, int]]:
    """Run what is not finished, one after another, and yield (run, exit status) as each ends, failed ones too.

    Once the budget is used up no further run begins.
    """
    for run in runs:
        if run.finished:
            continue
        if spent.used_up:
            return
        run.dir.parent.mkdir(parents=True, exist_ok=True)
        (run.dir.parent / f"{run.dir.name}.json").write_text(
            json.dumps({"arm": run.arm.name, "seed": run.seed, "set": list(run.arm.overrides)}, indent=2) + "\n"
        )
        with run.log.open("a") as log, spent.measured(run.dir.name):
            status = run_to_its_end(run.command(), log)
        yield run, status


def run_to_its_end(command: list[str], log: TextIO) -> int:
    """Run the command and return its exit status. SIGTERM is forwarded: the run saves and ends, then this process.

    If this process is killed, the command gets SIGTERM. It finds this environment's programs before others.
    """
    parent, path = os.getpid(), f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": path},
        preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
    )
    received = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        process.terminate()

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        status = process.wait()
    except BaseException:  # Ctrl-C, which the run receives too
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if received:
        raise SystemExit(128 + received[0])
    return status
