"""Runs the checks one after another, each in a process of its own that is ended with all that it started.

This process adopts what its children leave behind (it is their subreaper), so that it can find and end it. It imports
no torch: it must hold no memory of a GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

from or1_megatron.selftest.context import CheckedMachine, CheckOutcome, write_json
from or1_megatron.selftest.meeting import Meeting, without_torchrun
from or1_megatron.selftest.page import Report, write_page
from or1_megatron.selftest.provenance import ROOT, commit, versions
from or1_megatron.selftest.registry import RESULTS, Check, lacking
from or1_verify.child_process import describe_exit

_ONE_CHECK: Final = "or1_megatron.selftest.one"
_PR_SET_CHILD_SUBREAPER: Final = 36  # of <sys/prctl.h>
_LAST_LINES: Final = 15
_LEAST_S: Final = 5.0
"""A check is not started with less time than this."""
_SLOWEST_NODE_S: Final = 60.0
"""The meeting of the nodes waits so much longer than this node's time."""

SETTINGS: Final = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as under Megatron
    # Triton's products of fp32 are TF32 by default, vLLM's attention in Triton among them. The policy's are not.
    "TRITON_F32_DEFAULT": "ieee",
}
"""Environment of every check."""


class Interrupted(BaseException):
    """A signal ended the self-test."""

    def __init__(self, number: int) -> None:
        self.number = number


def run_checks(
    checks: Sequence[Check],
    out: Path,
    *,
    meeting: Meeting,
    devices: int | None = None,
    long: bool = False,
    minutes: float = 10.0,
    tell: Callable[[Check, CheckOutcome], None],
) -> Report:
    """Run the checks; after each, write ``selftest.json`` and ``selftest.md`` in ``out``. Main thread only.

    Args:
        out: made if it is not there; ``logs/<check>.log`` holds what each printed.
        devices: at most so many GPUs; on CPU, so many processes.
        minutes: when they are over, the check that runs is ended and no further one starts. The limit of each check,
            which is meant for 10 minutes in all, grows with them.
        tell: called after each check.

    Raises:
        Interrupted: by SIGINT, SIGTERM or SIGHUP. Nothing that was started is left.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    report = Report(
        command=" ".join(["or1", *sys.argv[1:]]),
        commit=commit(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        host=socket.gethostname(),
        machine="",
        versions=versions(),
        checks=list(checks),
    )
    end_s = time.monotonic() + 60.0 * minutes
    with _stopped_by_signals(), _scratch() as scratch:
        runner = _Runner(scratch, out, meeting, devices, long, patience=minutes / 10.0)
        machine = runner.machine()
        for check in checks:
            if isinstance(machine, CheckedMachine):
                report.machine = machine.name
                outcome = runner.outcome(check, machine, end_s)
            else:
                outcome = replace(machine, name=check.name)
            report.outcomes.append(outcome)
            write_json(out / "selftest.json", report.as_json())
            write_page(out / "selftest.md", report)
            tell(check, outcome)
    return report


class _Runner:
    """Starts and ends the processes."""

    def __init__(
        self, scratch: Path, out: Path, meeting: Meeting, devices: int | None, long: bool, patience: float
    ) -> None:
        """``patience``: multiplies the limit of each check."""
        self._scratch, self._out, self._meeting = scratch, out, meeting
        self._devices, self._long, self._patience = devices, long, patience
        self._ended: list[str] = []

    def machine(self) -> CheckedMachine | CheckOutcome:
        """Ask a process for this machine's devices; a CheckOutcome says why it has not answered."""
        outcome = self._run(None, None, 300.0)
        if isinstance(outcome, CheckOutcome):
            return outcome
        return replace(CheckedMachine(**outcome), nodes=self._meeting.nodes)

    def outcome(self, check: Check, machine: CheckedMachine, end_s: float) -> CheckOutcome:
        """Make one check, unless it is not possible or there is no time left."""
        if reason := lacking(check, machine):
            return CheckOutcome(check.name, "not possible", reason)
        left_s = end_s - time.monotonic()
        if "several nodes" in check.needs:
            left_s = max(left_s, 0.0) + _SLOWEST_NODE_S
        elif left_s < _LEAST_S:
            return CheckOutcome(check.name, "not started", "no time was left (--minutes)")
        found = self._run(check, machine, min(check.limit_s * self._patience, left_s))
        assert isinstance(found, CheckOutcome)
        self._ended.append(f"{check.name}={found.status}")
        return found

    def _run(
        self, check: Check | None, machine: CheckedMachine | None, limit_s: float
    ) -> dict[str, Any] | CheckOutcome:
        """Run ``one``; return what it wrote, or what became of it."""
        name = check.name if check else "machine"
        folder = self._scratch / name
        folder.mkdir()
        outcome, log = folder / "outcome.json", self._out / "logs" / f"{name}.log"
        task = {
            "check": check.name if check else None,
            "machine": asdict(machine) if machine else None,
            "devices": self._devices,
            "folder": str(folder),
            "long": self._long,
            "out": str(self._out),
            "outcome": str(outcome),
            "parent": os.getpid(),
        }
        (folder / "task.json").write_text(json.dumps(task))
        started_s = time.monotonic()
        with log.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", _ONE_CHECK, str(folder / "task.json")],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment(check),
                start_new_session=True,  # Ctrl-C comes to this process, which ends the check
            )
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_children()
        seconds = time.monotonic() - started_s
        found = json.loads(outcome.read_text()) if outcome.is_file() else None
        shutil.rmtree(folder, ignore_errors=True)
        if check is None and status == 0 and found is not None:
            return dict(found)
        return _judged(name, found, status, seconds, limit_s, log)

    def _environment(self, check: Check | None) -> dict[str, str]:
        """Return the check's environment; the meeting of the nodes alone is told where they meet."""
        environment = {**without_torchrun(os.environ), **SETTINGS}
        if check is not None and "several nodes" in check.needs:
            environment |= {**self._meeting.environment, RESULTS: ",".join(self._ended)}
        path = [str(ROOT), environment.get("PYTHONPATH", "")]
        # Whatever a check that is killed has left in its temporary folder goes with ours.
        return environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TMPDIR": str(self._scratch),
        }


def _judged(
    name: str, found: Mapping[str, Any] | None, status: int | None, seconds: float, limit_s: float, log: Path
) -> CheckOutcome:
    """Return the outcome that a check wrote, or a failure that says how its process ended."""
    outcome = CheckOutcome(**found) if found and "status" in found else CheckOutcome(name, "failed")
    outcome.seconds = round(seconds, 2)
    if status is None:
        outcome.status, outcome.reason = "failed", f"it took longer than {limit_s:.0f} s and was ended"
    elif status not in (0, 1) or found is None:
        outcome.status, outcome.reason = "failed", f"its process ended: {describe_exit(status)}"
    if outcome.status == "failed":
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        outcome.last_lines = tuple(line[:300] for line in lines[-_LAST_LINES:])
    return outcome


def end_children() -> None:
    """Kill all processes below this one, those included whose parents have ended, and wait until they are gone."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:  # it has just ended
                continue
        psutil.wait_procs(children, timeout=5.0)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a folder for all that the checks write. Its path is short: Ray's sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="or1-", dir="/tmp"))
    folder.chmod(0o711)  # started by root, the sandbox's second tier runs programs as another user
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise Interrupted on a signal; adopt orphans, and end all processes at the end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in handled:  # once is enough
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    previous = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        end_children()
        for number, handler in previous.items():
            signal.signal(number, handler)
