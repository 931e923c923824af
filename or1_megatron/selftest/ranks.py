"""Starts ranks for a check, and ends the check when one of them fails."""

from __future__ import annotations

from collections.abc import Sequence

from or1_megatron.runtime.launch import run_ranks
from or1_megatron.selftest.context import CheckFailed


def on_ranks(module: str, arguments: Sequence[str], ranks: int, task: str) -> None:
    """Run a module on so many ranks; raise CheckFailed when one fails. Main thread only."""
    status = run_ranks(module, arguments, ranks=ranks, threads_per_rank=None, grace_s=5.0, task=task, advice=".")
    if status:
        raise CheckFailed(f"{task} stopped with exit status {status}; the ranks' messages are in the log")
