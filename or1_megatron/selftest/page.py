"""The report of a self-test: JSON for programs, Markdown for people."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from or1_megatron.selftest.context import CheckOutcome, CheckStatus
from or1_megatron.selftest.figures import shown
from or1_megatron.selftest.registry import Check


@dataclass
class Report:
    """A run of the self-test, which may not have come to its end."""

    command: str
    commit: str
    started: str
    host: str
    machine: str
    versions: Mapping[str, str]
    checks: list[Check]
    """Those that were asked for; there is an outcome for each that has ended, in their order."""
    outcomes: list[CheckOutcome] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return self._with("failed")

    @property
    def not_started(self) -> list[str]:
        return self._with("not started")

    def _with(self, status: CheckStatus) -> list[str]:
        return [outcome.name for outcome in self.outcomes if outcome.status == status]

    def as_json(self) -> dict[str, Any]:
        names = [check.name for check in self.checks]
        return {**asdict(self), "checks": names, "finished": len(self.outcomes) == len(names)}


def write_page(path: Path, report: Report) -> None:
    path.write_text(page(report))


def page(report: Report) -> str:
    """Return the report in Markdown: where it ran, a table of the checks, the failures, every figure."""
    done = {outcome.name: outcome for outcome in report.outcomes}
    seconds = sum(outcome.seconds for outcome in report.outcomes)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    counts = ", ".join(
        f"{sum(outcome.status == status for outcome in report.outcomes)} {status}"
        for status in ("passed", "failed", "not possible", "not started")
    )
    parts = [
        "# or1 selftest",
        f"`{report.command}` at commit {report.commit}, {report.started}, on {report.host}: {report.machine or '?'}, "
        f"{platform.system()} {platform.release()}. {versions}.",
        f"{counts}; {seconds:.0f} s.",
        _table(
            ("check", "result", "seconds", "what it proves"),
            [_row(check, done.get(check.name)) for check in report.checks],
        ),
    ]
    for check, outcome in zip(report.checks, report.outcomes, strict=False):
        if outcome.status == "failed":
            parts.append(_failure(check, outcome))
    slower = [f"- {outcome.name}: {line}" for outcome in report.outcomes for line in outcome.slower]
    if slower:
        parts += ["## Not as fast as expected", "\n".join(slower)]
    parts += [
        f"## {outcome.name}\n\n{_table(('figure', 'measured', 'expected', 'met'), _figures(outcome))}"
        for outcome in report.outcomes
        if outcome.figures
    ]
    return "\n\n".join(parts) + "\n"


def _row(check: Check, outcome: CheckOutcome | None) -> tuple[str, ...]:
    if outcome is None:
        return check.name, "not run yet", "", check.proves
    status = "not possible here" if outcome.status == "not possible" else outcome.status
    reason = f": {outcome.reason}" if outcome.status in ("not possible", "not started") else ""
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds else ""
    return check.name, f"**{status}**" if status == "failed" else status + reason, seconds, check.proves


def _failure(check: Check, outcome: CheckOutcome) -> str:
    lines = "\n".join(outcome.last_lines)
    output = f"\n\n```\n{lines}\n```" if lines else ""
    return f"## {outcome.name} failed\n\n{outcome.reason}. Look at {check.look_at}.{output}"


def _figures(outcome: CheckOutcome) -> list[tuple[str, ...]]:
    return [
        (name, shown(entry["value"], entry["unit"]), entry.get("limit", ""), _met(entry))
        for name, entry in outcome.figures.items()
    ]


def _met(entry: Mapping[str, Any]) -> str:
    return "" if "met" not in entry else "yes" if entry["met"] else "**no**"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
