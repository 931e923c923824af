"""The runs of an ablation: each arm from the same start, once per seed; finished ones are never repeated.

A run lies in OUT/runs/KEY_seed_S, KEY standing for the arm's configuration: arms that two ablations share are run once.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from or1_megatron.ablate.ablation import Arm
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

BUSY: int = 75
"""Exit status of a sub-run that another process is at work on."""


@dataclass(frozen=True, slots=True)
class ArmRun:
    arm: Arm
    seed: int
    dir: Path

    @property
    def finished(self) -> bool:
        return _finished(self.dir)

    @property
    def log(self) -> Path:
        return self.dir.with_suffix(".log")

    def command(self) -> list[str]:
        """The command that runs it, or goes on with it."""
        overrides = [*self.arm.overrides, f"run.dir={self.dir}", f"run.seed={self.seed}"]
        sets = [part for override in overrides for part in ("--set", override)]
        return [sys.executable, "-m", "or1_megatron.commands.app", "train", str(self.arm.base), *sets]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics, one per step, in order; none when there are none yet."""
        metrics = RunFolder(self.dir).metrics
        return list(read_steps(metrics).values()) if metrics.is_file() else []


def runs_of(arms: Sequence[Arm], seeds: Sequence[int], out: Path) -> list[ArmRun]:
    """Seed by seed, so that a campaign that is cut short has whole rounds."""
    return [ArmRun(arm, seed, out / "runs" / f"{arm.key}_seed_{seed}") for seed in seeds for arm in arms]


def run_all(runs: Sequence[ArmRun]) -> Iterator[tuple[ArmRun, int]]:
    """Run what is not finished, one after another; (run, exit status) as each ends. One that fails stops no other."""
    for run in runs:
        if run.finished:
            continue
        run.dir.parent.mkdir(parents=True, exist_ok=True)
        (run.dir.parent / f"{run.dir.name}.json").write_text(
            json.dumps({"arm": run.arm.name, "seed": run.seed, "set": list(run.arm.overrides)}, indent=2) + "\n"
        )
        with run.log.open("a") as log:
            status = _run_to_its_end(run.command(), log)
        yield run, status


def _run_to_its_end(command: list[str], log: TextIO) -> int:
    """Its exit status. SIGTERM is passed on to it: it saves and ends, and then so does this process."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    heard = []

    def pass_on(number: int, _: object) -> None:
        heard.append(number)
        process.terminate()

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        status = process.wait()
    except BaseException:  # Ctrl-C, which the run has heard too
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if heard:
        raise SystemExit(128 + heard[0])
    return status


def _finished(folder: Path) -> bool:
    summary = RunFolder(folder).summary
    if not summary.is_file():
        return False
    try:
        return bool(json.loads(summary.read_text())["finished"])
    except (ValueError, KeyError):
        return False
