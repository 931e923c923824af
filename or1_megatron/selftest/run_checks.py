"""Runs the checks one after another, each in its own process, and afterwards ends all processes that it started.

This process adopts the orphans of its children (it is their subreaper), so that it can end them. It does not import
torch, because it must hold no GPU memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from or1_megatron.runtime.signals import signals_handled_by
from or1_megatron.runtime.versions import ROOT
from or1_megatron.selftest.one_check import Check, CheckOutcome
from or1_megatron.selftest.outcome_report import Report, lines_of
from or1_megatron.selftest.process import MODULE, write_task
from or1_verify.child_process import describe_exit

_PR_SET_CHILD_SUBREAPER: Final = 36  # of <sys/prctl.h>
_LAST_LINES: Final = 15
_LEAST_S: Final = 5.0
"""A check is started only if at least this much time is left."""

SETTINGS: Final = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as under Megatron
}
"""Environment variables of every check."""


def run_checks(checks: Sequence[Check], out: Path, *, minutes: float = 10.0) -> Report:
    """Run checks (in the main thread only). After each check, print its outcome and write the report to ``out``.

    Args:
        out: folder for ``selftest.json``, ``selftest.txt`` and ``logs/<check>.log``; made if it is missing.
        minutes: time limit of all checks together. At this limit the running check is ended, and no other check starts.
            Each check's own limit is for a total of 10 minutes, and is scaled by ``minutes`` / 10.

    Raises:
        SystemExit: on a stop signal (``runtime.signals.LAUNCHER_STOP_SIGNALS``), with 128 plus its number. No process
            is left running.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    report = Report([check.name for check in checks])
    report.write(out)
    end_s = time.monotonic() + 60.0 * minutes
    temporary = tempfile.TemporaryDirectory(prefix="or1-", dir="/tmp", ignore_cleanup_errors=True)
    with _stopped_by_signals(), temporary as folder:
        scratch = Path(folder)  # a short path: Ray's sockets lie below it
        scratch.chmod(0o711)  # started by root, the sandbox's second tier runs programs as another user
        for check in checks:
            left_s = end_s - time.monotonic()
            if left_s < _LEAST_S:
                outcome = CheckOutcome(check.name, "failed", "not started, as no time was left (--minutes)")
            else:
                limit_s = min(check.limit_s * minutes / 10.0, left_s)
                outcome = _run(check, limit_s, scratch, out)
            report.outcomes.append(outcome)
            report.write(out)
            print(*lines_of(outcome), sep="\n", flush=True)
    return report


def _run(check: Check, limit_s: float, scratch: Path, out: Path) -> CheckOutcome:
    folder, log = scratch / check.name, out / "logs" / f"{check.name}.log"
    folder.mkdir()
    task = {"check": asdict(check), "folder": str(folder), "parent": os.getpid()}
    path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    todo, result = write_task(folder, task)
    started_s = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, "or1_megatron.selftest.one_check:perform", todo, result],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **SETTINGS, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # Ctrl-C comes to this process, which ends the check
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_children()
    noted = json.loads(Path(result).read_text()) if Path(result).is_file() else None
    shutil.rmtree(folder, ignore_errors=True)
    outcome = CheckOutcome(**noted) if noted else CheckOutcome(check.name, "failed")
    outcome.seconds = round(time.monotonic() - started_s, 2)
    if status is None:
        outcome.status, outcome.reason = "failed", f"it took longer than {limit_s:.0f} s and was ended"
    elif status or noted is None:
        outcome.status, outcome.reason = "failed", f"its process ended: {describe_exit(status)}"
    if outcome.status == "failed":
        lines = log.read_text(errors="replace").splitlines()
        outcome.last_lines = tuple(line[:300] for line in lines[-_LAST_LINES:])
    return outcome


def end_children() -> None:
    """Kill all descendants of this process, orphans included, and wait until they are gone."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:  # it has just ended
                continue
        psutil.wait_procs(children, timeout=5.0)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Within the block, adopt orphans, and raise SystemExit on the first signal. After it, end all child processes."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ending: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not ending:
            ending.append(number)
            raise SystemExit(128 + number)

    with signals_handled_by(stop):
        try:
            yield
        finally:
            ending.append(0)
            end_children()
