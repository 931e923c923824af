"""Self-test of training: a short run of the quickstart on this machine's devices, with ``or1 train``."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from or1_megatron.config.load import load_config
from or1_megatron.selftest.one_check import CheckFailed, Context
from or1_megatron.selftest.setups import QUICKSTART, training_run


def train(context: Context) -> None:
    short_run(context, "colocated")


def train_separate(context: Context) -> None:
    short_run(context, "separate")


def short_run(context: Context, placement: str) -> None:
    """Train the quickstart for a few steps with one placement, and check the metrics that the run has recorded."""
    run, data = context.folder / "run", context.folder / "data"
    count = ["--train", "1024" if context.machine.cuda else "128", "--held-out", "64" if context.machine.cuda else "8"]
    subprocess.run([sys.executable, str(QUICKSTART / "task.py"), "--out", str(data), *count], check=True)
    config, overrides = training_run(context.machine, placement, run, data)
    command = [sys.executable, "-P", "-m", "or1_megatron.commands.app", "train", str(config)]
    status = subprocess.run([*command, *(f"--set={each}" for each in overrides)], check=False).returncode
    if status:
        raise CheckFailed(f"or1 train ended with exit status {status}; its messages are in the log")
    note(context, run, load_config(config, overrides).total_steps, 0.05 if context.machine.cuda else 1e-4)


def note(context: Context, run: Path, steps: int, bound: float) -> None:
    """Check a run's metrics and summary. ``bound``: largest allowed mean log-prob mismatch, in nats."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "mismatch/mean_abs" in row]  # the first row is from before training
    context.require("steps", len(trained), at_least=steps)
    finite = all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    context.require("every metric is finite", finite)
    probes = [row["handoff/probe_max_abs_diff"] for row in rows if "handoff/probe_max_abs_diff" in row]
    context.measure("largest log-prob difference of the probes", max(probes, default=math.nan), "nats")
    apart = max((row["mismatch/mean_abs"] for row in trained), default=math.nan)
    context.require("mean log-prob difference of sampled tokens, worst step", apart, "nats", at_most=bound)
    summary = json.loads((run / "summary.json").read_text())
    context.require("the run came to its end", bool(summary["finished"]))
    for name in ("accuracy_before", "accuracy_after"):
        if summary.get(name) is not None:
            context.measure(name.replace("_", " "), summary[name], "share")
    if trained:
        context.measure("median step", statistics.median(row["time/step"] for row in trained), "s")
