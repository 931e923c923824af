"""Measures how far the policy differs from transformers + torch at each layout, on the quickstart's base model.

    python lab/benchmarks/parity.py

Writes the figures that `or1 check-parity examples/quickstart/base_model` prints to a result file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from result import ROOT, figure, write_result

from or1_megatron.selftest.checks.layouts import TOLERANCE, default_layouts

MODEL = ROOT / "examples" / "quickstart" / "base_model"
MORE = ("PP2 layers=3+1", "TP2 PP2 SP distopt", "full", "selective", "one_pass", "PP2 VPP2 one_pass overlap")


def main() -> int:
    layouts = (*default_layouts(longest=48), *MORE)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "-m", "or1_megatron.commands.app", "check-parity", str(MODEL), "--out", str(out)]
        status = subprocess.run([*command, *(f"--layout={layout}" for layout in layouts)], check=False).returncode
        rows = json.loads(out.read_text())
    figures = {
        f"{row['name']}: {kind.replace('_', ' ')}": figure(row["difference"][kind], at_most=bound)
        for row in rows
        for kind, bound in TOLERANCE["float32"].items()
    }
    write_result("parity", figures, {"model": "examples/quickstart/base_model", "dtype": "float32", "sequences": 24})
    return status


if __name__ == "__main__":
    sys.exit(main())
