"""One check in a process of its own: ``python -m or1_megatron.selftest.one TASK.json``, started by ``run``.

A task without a check asks for the machine: the process that stays must not hold a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from or1_megatron.selftest.context import (
    CheckedMachine,
    CheckFailed,
    CheckOutcome,
    Context,
    NotPossible,
    unmet,
    write_json,
)
from or1_megatron.selftest.provenance import device
from or1_verify.child_process import die_with_parent
from or1_verify.errors import Or1Error


def check_function(name: str) -> Callable[[Context], None]:
    """Return the function that makes the check of this name. Imports this check's module alone.

    Raises:
        KeyError: there is no such check.
    """
    match name:
        case "devices":
            from or1_megatron.selftest.checks.devices import devices as function
        case "kernels":
            from or1_megatron.selftest.checks.kernels import kernels as function
        case "layouts":
            from or1_megatron.selftest.checks.layouts import layouts as function
        case "layers":
            from or1_megatron.selftest.checks.layers import layers as function
        case "checkpoint":
            from or1_megatron.selftest.checks.checkpoint import checkpoint as function
        case "offload":
            from or1_megatron.selftest.checks.offload import offload as function
        case "transports":
            from or1_megatron.selftest.checks.transports import transports as function
        case "handoff":
            from or1_megatron.selftest.checks.engines import handoff as function
        case "sleep":
            from or1_megatron.selftest.checks.engines import sleep as function
        case "log-probs":
            from or1_megatron.selftest.checks.log_probs import log_probs as function
        case "sandbox":
            from or1_megatron.selftest.checks.sandbox import sandbox as function
        case "train":
            from or1_megatron.selftest.checks.training import train as function
        case "train-separate":
            from or1_megatron.selftest.checks.training import train_separate as function
        case "throughput":
            from or1_megatron.selftest.checks.throughput import throughput as function
        case "nodes":
            from or1_megatron.selftest.checks.nodes import nodes as function
        case _:
            raise KeyError(name)
    return function


def this_machine(devices: int | None) -> CheckedMachine:
    """Return the GPUs, or two processes on CPU; ``devices``: at most so many GPUs, or so many processes."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return CheckedMachine(True, min(devices or count, count), f"{count} x {device()}")
    return CheckedMachine(False, devices or 2, device())


def perform(name: str, task: dict[str, Any]) -> CheckOutcome:
    """Make the check of this name; write its outcome as it goes on."""
    path = Path(task["outcome"])
    # A kill from outside leaves this file as it is: until the check has passed, it has failed.
    outcome = CheckOutcome(name, "failed", "it did not end")
    try:
        folder, out = Path(task["folder"]), Path(task["out"])
        context = Context(CheckedMachine(**task["machine"]), folder, out, task["long"], outcome, path)
        check_function(name)(context)
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
    return 1 if perform(task["check"], task).status == "failed" else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what a library leaves running at the exit cannot hang the check
