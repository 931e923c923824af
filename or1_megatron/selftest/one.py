"""One check in a process of its own: ``python -m or1_megatron.selftest.one TASK.json``, started by ``run``.

A task without a check asks for the machine: the process that stays must not hold a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from or1_megatron.errors import Or1Error
from or1_megatron.runtime.signals import die_with_parent
from or1_megatron.selftest.context import CheckFailed, Context, Machine, NotPossible, Outcome, unmet, write_json
from or1_megatron.selftest.provenance import device
from or1_megatron.selftest.registry import Check


def this_machine(devices: int | None) -> Machine:
    """Return the GPUs, or two processes on CPU; ``devices``: at most so many GPUs, or so many processes."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return Machine(True, min(devices or count, count), f"{count} x {device()}")
    return Machine(False, devices or 2, device())


def perform(check: Check, task: dict[str, Any]) -> Outcome:
    """Make the check; write its outcome as it goes on."""
    path = Path(task["outcome"])
    # A kill from outside leaves this file as it is: until the check has passed, it has failed.
    outcome = Outcome(check.name, "failed", "it did not end")
    try:
        folder, out = Path(task["folder"]), Path(task["out"])
        context = Context(Machine(**task["machine"]), folder, out, task["long"], outcome, path)
        module = importlib.import_module(check.place)
        getattr(module, check.function)(context)
        wrong = unmet(outcome.figures)
        outcome.status, outcome.reason = ("failed", "; ".join(wrong)) if wrong else ("passed", "")
    except NotPossible as error:
        outcome.status, outcome.reason = "not possible", str(error)
    except CheckFailed as error:
        outcome.reason = str(error)
    except Exception as error:
        traceback.print_exc()
        outcome.reason = str(error) if isinstance(error, Or1Error) else f"{type(error).__name__}: {error}"
    write_json(path, asdict(outcome))
    return outcome


def main() -> int:
    task = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(task["parent"])
    if task["check"] is None:
        write_json(Path(task["outcome"]), asdict(this_machine(task["devices"])))
        return 0
    return 1 if perform(Check(**task["check"]), task).status == "failed" else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what a library leaves running at the exit cannot hang the check
