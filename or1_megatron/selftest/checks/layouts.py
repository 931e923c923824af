"""``or1 check-parity`` at every layout that the devices allow, on a random model, in fp32 and bf16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch

from or1_megatron.selftest.context import CheckFailed, Context
from or1_megatron.selftest.models import random_qwen2
from or1_megatron.selftest.plans import layouts_for, small_shape

KINDS: Final = {"log_prob": "log-prob", "entropy": "entropy", "gradient": "gradient, relative"}


def layouts(context: Context) -> None:
    machine = context.machine
    model = random_qwen2(small_shape(machine.cuda), context.folder, torch.float32)
    names = layouts_for(machine.cuda, machine.devices)
    started = {
        short: start(context, model, names, dtype, context.folder / f"{short}.json")
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"))
    }  # both at once: most of it is their start
    for short, process in started.items():
        note(context, names, short, process.wait())


def start(context: Context, model: Path, names: list[str], dtype: str, out: Path) -> subprocess.Popen[bytes]:
    chosen = [part for name in names for part in ("--layout", name)]
    # A GPU's products sum in another order at other sizes, so that fp32's last bits differ more than on CPU.
    sizes = ["--sequences", "16", "--longest", "256", "--tolerance", "3"] if context.machine.cuda else []
    sizes = sizes or ["--sequences", "6", "--longest", "48"]  # four rows, two of them with two sequences
    command = [sys.executable, "-P", "-m", "or1_megatron.commands.app", "check-parity", str(model), "--dtype", dtype]
    return subprocess.Popen([*command, *sizes, *chosen, "--out", str(out)])


def note(context: Context, names: list[str], short: str, status: int) -> None:
    """Note the largest differences that the command found, each with the layout that has it."""
    out = context.folder / f"{short}.json"
    rows = json.loads(out.read_text()) if out.is_file() else []
    differing = [f"{row['name']}: {line}" for row in rows for line in row["beyond"]]
    context.measure(f"{short}: layouts", len(rows))
    context.require(
        f"{short}: layouts that differ from transformers", sum(bool(row["beyond"]) for row in rows), at_most=0
    )
    for kind, words in KINDS.items():
        worst = max(rows, key=lambda row: row["difference"][kind], default=None)
        if worst is not None:
            context.measure(f"{short}: largest difference, {words} ({worst['name']})", worst["difference"][kind])
    if differing:
        raise CheckFailed(f"{short}: {'; '.join(differing)}")
    if status or len(rows) < len(names):
        missing = ", ".join(names[len(rows) :])
        raise CheckFailed(f"{short}: check-parity ended with exit status {status}; not measured: {missing or 'none'}")
