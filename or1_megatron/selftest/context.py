"""What a check is given, and how it tells what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from or1_megatron.selftest.figures import figure, shown
from or1_verify.errors import Or1Error

CheckStatus = Literal["passed", "failed", "not possible", "not started"]


class NotPossible(Or1Error):
    """The check cannot be made on this machine; the message says what it lacks."""


class CheckFailed(Or1Error):
    """What the check found is wrong."""


@dataclass(frozen=True)
class CheckedMachine:
    """The devices that the checks use: GPUs, or on a machine without any, processes on its CPU."""

    cuda: bool
    devices: int
    name: str
    """Names its GPUs or its processor."""
    nodes: int = 1
    """Machines on which the self-test runs at the same time."""


@dataclass
class CheckOutcome:
    """The result of one check."""

    name: str
    status: CheckStatus
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: ``figures.figure``, and ``required`` where the check fails unless the limit is met."""
    last_lines: tuple[str, ...] = ()
    """The end of its output, if it failed."""

    @property
    def slower(self) -> list[str]:
        """The figures that are not what was expected, and do not fail the check."""
        return [
            f"{name} {shown(entry['value'], entry['unit'])}, expected {entry['limit']}"
            for name, entry in self.figures.items()
            if not entry.get("required") and not entry.get("met", True)
        ]


class Limit(TypedDict, total=False):
    """What a figure should keep: one of the two, or neither."""

    at_most: float | None
    at_least: float | None


class Context:
    """One check's surroundings. What it has found is on disk at once, so that a check that is killed leaves it."""

    def __init__(
        self, machine: CheckedMachine, folder: Path, out: Path, long: bool, outcome: CheckOutcome, path: Path
    ) -> None:
        """
        Args:
            folder: for what the check writes; removed afterwards.
            out: the report's folder.
            long: measure longer, for figures to be published.
            outcome: is written to ``path`` with every figure.
        """
        self.machine, self.folder, self.out, self.long = machine, folder, out, long
        self._outcome, self._path = outcome, path

    def measure(self, name: str, value: float | int | str, unit: str = "", **limit: Unpack[Limit]) -> None:
        """Note a figure beside what is expected of it. A speed that is missed does not fail the check."""
        self._note(name, figure(value, unit, **limit))

    def require(self, name: str, value: float | int | bool, unit: str = "", **limit: Unpack[Limit]) -> None:
        """Note a figure whose limit must be met, else the check fails once it has ended."""
        self._note(name, {**figure(value, unit, **limit), "required": True})

    def _note(self, name: str, entry: dict[str, Any]) -> None:
        self._outcome.figures[name] = entry
        print(f"{name}: {shown(entry['value'], entry['unit'])} {entry.get('limit', '')}", flush=True)
        write_json(self._path, asdict(self._outcome))


def unmet(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each required figure whose limit is not met."""
    return [
        f"{name} is {shown(entry['value'], entry['unit'])}, expected {entry['limit']}"
        for name, entry in figures.items()
        if entry.get("required") and not entry["met"]
    ]


def write_json(path: Path, content: Any) -> None:
    """Write a file in one move, so that a kill never leaves half of it. NaN and infinity become words."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(aside, path)


def _finite(content: Any) -> Any:
    if isinstance(content, float) and content - content != 0:
        return str(content)
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [_finite(value) for value in content]
    return content
