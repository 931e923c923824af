"""Whole runs of ``or1 train`` as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from typer.testing import CliRunner
from waiting import wait_until

from or1_megatron.commands.app import app
from or1_megatron.runtime.heartbeat import beats_folder, read_beats
from or1_megatron.runtime.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 2400.0
"""How long a run, or one of its checkpoints, may take on a busy machine."""
SABOTAGE = Path(__file__).with_name("sabotage")


class Training:
    """A running ``or1 train``, with every process that it starts."""

    def __init__(self, config: Path, *overrides: str, hold_after: int | None = None, **environment: str) -> None:
        """
        Args:
            hold_after: the loop waits after this step until a stop is requested.
            environment: further variables; SABOTAGE names a fault of tests/train/sabotage.
        """
        if hold_after is not None:
            environment |= {"SABOTAGE": "hold", "SABOTAGE_STEP": str(hold_after)}
        sets = [part for override in overrides for part in ("--set", override)]
        path = [SABOTAGE, ROOT] if "SABOTAGE" in environment else [ROOT]
        command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(config), *sets]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._seen: dict[int, float] = {}

    def end(self) -> None:
        """Kill all processes of the run that still live."""
        for child in self.descendants():
            child.kill()
        self.process.kill()
        self.process.wait()

    def descendants(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        for child in found:
            try:
                self._seen[child.pid] = child.create_time()
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_for_checkpoint(self, run: Path, step: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the checkpoint of this step, or a later one, is complete."""

        def is_there() -> bool:
            self.descendants()
            assert self.process.poll() is None, f"training ended early:\n{self.process.communicate()[0][-4000:]}"
            return newest_checkpoint(run) >= step

        wait_until(is_there, f"the checkpoint of step {step}", timeout_s, 0.1)

    def finish(self, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """Wait for the end of a run that ends by itself or was asked to end; return (exit status, output)."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"hung:\n{self.process.communicate()[0][-4000:]}") from None
        return self.process.returncode, output

    def survivors(self, patience_s: float = 120) -> list[str]:
        """Return the processes of the run that still live after ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            alive = [process for process in map(self._alive, self._seen.items()) if process is not None]
            if not alive or time.monotonic() > deadline:
                return [f"{process.pid} {process.cmdline()[:4]}" for process in alive]
            time.sleep(0.2)

    @staticmethod
    def _alive(item: tuple[int, float]) -> psutil.Process | None:
        pid, created_s = item
        try:
            process = psutil.Process(pid)
            if process.create_time() == created_s and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.NoSuchProcess:
            pass
        return None


def refused(config: Path, *overrides: str, stage: int | None = None) -> str:
    """Run ``or1 train``, which must refuse before it starts any rank; return its error message."""
    options = [part for override in overrides for part in ("--set", override)]
    options += [] if stage is None else ["--stage", str(stage)]
    result = CliRunner().invoke(app, ["train", str(config), *options])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("or1: error: ") and result.stderr.count("or1: error") == 1
    assert "Traceback" not in result.output
    return result.stderr


def newest_checkpoint(run: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 without any."""
    return max(checkpoint_steps(run), default=0)


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps with complete checkpoints. Partial checkpoints, and those set aside, do not count."""
    names = [path.parent.name for path in (run / "checkpoints").glob("step_*/manifest.json")]
    return sorted(int(name.removeprefix("step_")) for name in names if "." not in name)


def read_rows(metrics: Path) -> list[dict[str, float]]:
    """Return the rows in a metrics file. A last line that is still being written is left out."""
    if not metrics.is_file():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def process_of(run: Path, who: str) -> int:
    """Wait for a process that calls itself ``who``, and return its pid."""

    def pid() -> int | None:
        beats = read_beats(beats_folder(RunFolder(run).run_id))
        return next((beat.pid for beat in beats if beat.who == who and psutil.pid_exists(beat.pid)), None)

    found = wait_until(pid, who, PATIENCE_S, 0.1)
    assert found is not None
    return found


def wait_for_rows(training: Training, run: Path, step: int) -> None:
    def is_there() -> bool:
        assert training.process.poll() is None, training.finish()[1][-5000:]
        training.descendants()
        return max((row["step"] for row in read_rows(run / "metrics.jsonl")), default=-1) >= step

    wait_until(is_there, f"the row of step {step}", PATIENCE_S, 0.1)


def faults(run: Path) -> list[dict[str, str]]:
    path = run / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
