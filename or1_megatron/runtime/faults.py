"""The record of a run's faults (stalls, failures, restarts of ranks and engines): ``faults.jsonl``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from or1_megatron.runtime.files import append_whole
from or1_megatron.runtime.jsonl import read_rows

FaultKind = Literal["stalled", "failed", "restart", "engine", "manager"]

COUNTED: Final[Mapping[FaultKind, str]] = {  # their meanings are in schemas.metrics.FAULTS
    "stalled": "faults/stalled",
    "restart": "faults/restarts",
    "engine": "faults/engines",
    "manager": "faults/managers",
}
"""For each kind, the metric that counts its faults over the whole run. ``failed`` has no metric: a restart follows."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of faults.jsonl.

    Kinds: ``stalled`` (the watchdog killed a process), ``failed`` (a rank ended), ``restart`` (the launcher started the
    ranks again), ``engine`` and ``manager`` (an engine or the RolloutManager was restarted).
    """

    kind: FaultKind
    who: str
    why: str
    time_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""


class FaultRecord:
    """Reads and writes faults.jsonl of a run folder. Several processes append to it, each line with one write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "faults.jsonl"

    def write(self, fault: Fault) -> None:
        """Append a line. If the disk is full or missing, the line is lost; the run's other writes raise the error."""
        row = {"time_s": fault.time_s, "kind": fault.kind, "who": fault.who, "why": fault.why}
        _append(self.path, json.dumps(row) + "\n")

    def failed(self, who: str) -> Callable[[str], None]:
        """Return a function that takes a reason and records it as the failure of ``who``."""
        return lambda why: self.write(Fault("failed", who, why))

    def read(self, since_s: float = 0.0) -> Iterator[Fault]:
        """Yield the faults since ``since_s`` (seconds since the epoch), in order. Incomplete lines are left out."""
        for row in read_rows(self.path, bad_lines=[]) if self.path.is_file() else ():
            with suppress(KeyError, TypeError, ValueError):
                fault = Fault(row["kind"], row["who"], row["why"], float(row["time_s"]))
                if fault.time_s >= since_s:
                    yield fault

    def counts(self) -> dict[str, float]:
        """Return the metrics that count the faults: {} before the run's first fault, later all metrics of COUNTED."""
        counted = Counter(fault.kind for fault in self.read())
        return {name: float(counted[kind]) for kind, name in COUNTED.items()} if counted else {}


def _append(path: Path, text: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            append_whole(file.fileno(), text.encode())
