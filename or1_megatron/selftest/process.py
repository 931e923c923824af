"""Calls a function in processes of its own: ``python -m or1_megatron.selftest.process MODULE:FUNCTION TASK OUT``.

The files TASK and OUT are JSON. The function gets the task and ``note``, which writes a result to OUT in place of the
earlier result. If the task has ``parent`` (a pid), the process ends when the parent ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from or1_megatron.runtime.files import write_atomically
from or1_megatron.selftest.one_check import CheckFailed
from or1_verify.child_process import die_with_parent

MODULE: Final = "or1_megatron.selftest.process"


def run_function(function: str, task: Mapping[str, Any], ranks: int, what: str) -> tuple[int, Any]:
    """Call a function on ``ranks`` ranks under torchrun (main thread only); return (exit status, last noted result).

    Args:
        function: the function, as MODULE:FUNCTION.
        what: name of the work, for messages.
    """
    from or1_megatron.runtime.launch import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        arguments = [function, *write_task(Path(folder), task)]
        status = run_ranks(MODULE, arguments, ranks=ranks, grace_s=5.0, task=what)
        result = Path(arguments[-1])
        return status, json.loads(result.read_text()) if result.is_file() else None


def on_ranks(function: str, task: Mapping[str, Any], ranks: int, what: str) -> Any:
    """Call a function on ranks as ``run_function`` does, and return its last noted result.

    Raises:
        CheckFailed: a rank failed.
    """
    status, noted = run_function(function, task, ranks, what)
    if status:
        raise CheckFailed(f"{what} stopped with exit status {status}; the ranks' messages are in the log")
    return noted


def write_task(folder: Path, task: Mapping[str, Any]) -> tuple[str, str]:
    """Write a task to a file in ``folder``; return (path of the task, path for the result)."""
    todo = folder / "task.json"
    todo.write_text(json.dumps(task))
    return str(todo), str(folder / "result.json")


def main() -> None:
    function, task, out = sys.argv[1:]

    def note(result: Any) -> None:
        write_atomically(Path(out), json.dumps(result).encode(), "the result")

    values = json.loads(Path(task).read_text())
    if "parent" in values:
        die_with_parent(values["parent"])
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(values, note)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that a library leaves running at the exit cannot hang the check
