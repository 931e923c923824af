"""Writes the report of a self-test, as JSON and as text."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

from pydantic_core import to_json

from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.versions import commit, versions
from or1_megatron.selftest.one_check import CheckOutcome, CheckStatus, shown


@dataclass
class Report:
    """The report of a finished or unfinished self-test."""

    checks: list[str]
    """Names of the checks to run, in order. ``outcomes`` has the outcomes of the checks that have ended."""
    command: str = field(default_factory=lambda: " ".join(["or1", *sys.argv[1:]]))
    commit: str = field(default_factory=commit)
    started: str = field(default_factory=partial(time.strftime, "%Y-%m-%dT%H:%M:%S%z"))
    host: str = field(default_factory=socket.gethostname)
    versions: Mapping[str, str] = field(default_factory=versions)
    outcomes: list[CheckOutcome] = field(default_factory=list)

    def ended(self, status: CheckStatus) -> list[str]:
        """Return the names of the checks that ended with this status."""
        return [outcome.name for outcome in self.outcomes if outcome.status == status]

    @property
    def machine(self) -> str:
        return next((outcome.machine for outcome in self.outcomes if outcome.machine), "")

    def write(self, out: Path) -> None:
        """Write ``selftest.json`` and ``selftest.txt`` in ``out``, each atomically."""
        values = {**vars(self), "machine": self.machine, "finished": len(self.outcomes) == len(self.checks)}
        whole = to_json(values, indent=1, inf_nan_mode="strings")  # valid for every JSON reader
        write_atomically(out / "selftest.json", whole, "the report")
        write_atomically(out / "selftest.txt", ("\n".join(self.lines()) + "\n").encode(), "the report")

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text report: machine, number of checks by status, and each check with its figures."""
        yield f"{self.command} at commit {self.commit}, {self.started}"
        yield f"on {self.host}: {self.machine or '?'}, {platform.system()} {platform.release()}"
        yield ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield ", ".join(f"{len(self.ended(status))} {status}" for status in get_args(CheckStatus))
        for outcome in self.outcomes:
            yield ""
            yield from lines_of(outcome)
        for name in self.checks[len(self.outcomes) :]:
            yield f"\n{name}: not run yet"


def lines_of(outcome: CheckOutcome) -> Iterator[str]:
    """Yield a line that says how a check ended, then its figures, with "!" before each unexpected figure."""
    seconds = f" ({outcome.seconds:.1f} s)" if outcome.seconds else ""
    yield f"{outcome.name}: {outcome.status}{seconds}" + (f": {outcome.reason}" if outcome.reason else "")
    for name, entry in outcome.figures.items():
        remark = entry.get("follows", "")
        if "limit" in entry and not isinstance(entry["value"], bool):
            remark = f"expected {entry['limit']}"
        as_expected = entry.get("met", entry.get("status", "ok") == "ok")
        value = shown(entry["value"], entry["unit"]) + (f"  ({remark})" if remark else "")
        yield f"  {' ' if as_expected else '!'} {name}: {value}"
    for line in outcome.last_lines:
        yield f"    | {line}"
