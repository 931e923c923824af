"""The report of a self-test: JSON for programs, Markdown for people."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from pydantic_core import to_json

from or1_megatron.selftest.one_check import Check, CheckOutcome, CheckStatus, shown

WITH_REASON: Final = ("not possible", "not started")
"""The statuses whose reason stands beside them."""


@dataclass
class Report:
    """A run of the self-test, which may not have come to its end."""

    command: str
    commit: str
    started: str
    host: str
    versions: Mapping[str, str]
    checks: list[Check]
    """Those that were asked for; there is an outcome for each that has ended, in their order."""
    outcomes: list[CheckOutcome] = field(default_factory=list)

    def ended(self, status: CheckStatus) -> list[str]:
        """Return the names of the checks that ended so."""
        return [outcome.name for outcome in self.outcomes if outcome.status == status]

    @property
    def machine(self) -> str:
        return next((outcome.machine for outcome in self.outcomes if outcome.machine), "")

    def write(self, out: Path) -> None:
        """Write ``selftest.json`` and ``selftest.md``, each in one move, so that a kill never leaves half of one."""
        names = [check.name for check in self.checks]
        values = {**vars(self), "machine": self.machine, "checks": names}
        values["finished"] = len(self.outcomes) == len(names)
        whole = to_json(values, indent=1, inf_nan_mode="strings")  # which every reader of JSON takes
        for name, content in (("selftest.json", whole), ("selftest.md", page(self).encode())):
            aside = out / f".{name}.partial"
            aside.write_bytes(content)
            aside.replace(out / name)


def page(report: Report) -> str:
    """Return the report in Markdown: where it ran, a table of the checks, the failures, every figure."""
    seconds = sum(outcome.seconds for outcome in report.outcomes)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    counts = ", ".join(f"{len(report.ended(status))} {status}" for status in get_args(CheckStatus))
    left = report.checks[len(report.outcomes) :]
    rows = [_row(check, outcome) for check, outcome in zip(report.checks, report.outcomes, strict=False)]
    rows += [(check.name, "not run yet", "", check.proves) for check in left]
    parts = [
        "# or1 selftest",
        f"`{report.command}` at commit {report.commit}, {report.started}, on {report.host}: {report.machine or '?'}, "
        f"{platform.system()} {platform.release()}. {versions}.",
        f"{counts}; {seconds:.0f} s.",
        _table(("check", "result", "seconds", "what it proves"), rows),
    ]
    for check, outcome in zip(report.checks, report.outcomes, strict=False):
        if outcome.status == "failed":
            output = "\n".join(("```", *outcome.last_lines, "```")) if outcome.last_lines else ""
            text = f"## {check.name} failed\n\n{outcome.reason}. Look at {check.look_at}.\n\n{output}"
            parts.append(text.rstrip())
    slower = [f"- {outcome.name}: {line}" for outcome in report.outcomes for line in outcome.slower]
    if slower:
        parts += ["## Not as fast as expected", "\n".join(slower)]
    for outcome in report.outcomes:
        if outcome.figures:
            table = _table(("figure", "measured", "expected", "met"), map(_figure, outcome.figures.items()))
            parts.append(f"## {outcome.name}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _row(check: Check, outcome: CheckOutcome) -> tuple[str, ...]:
    status = "not possible here" if outcome.status == "not possible" else outcome.status
    reason = f": {outcome.reason}" if outcome.status in WITH_REASON else ""
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds else ""
    return check.name, f"**{status}**" if status == "failed" else status + reason, seconds, check.proves


def _figure(named: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, entry = named
    met = "" if "met" not in entry else "yes" if entry["met"] else "**no**"
    expected = entry.get("limit") or entry.get("follows", "")
    return name, shown(entry["value"], entry["unit"]), expected, entry.get("status", met)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
