"""Every Triton kernel compiles for Hopper as its launcher calls it, within the limits of lab/benchmarks/cubins.py.

Not proven here: that the compiled kernels are right (test_head.py interprets them) or fast; other GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CUBINS = Path(__file__).parents[2] / "lab" / "benchmarks" / "cubins.py"


def test_every_kernel_compiles_for_hopper_within_its_limits(tmp_path: Path) -> None:
    """Two widths of each: statistics of 16, 9 and one token; gradients in two dtypes with and without entropy;
    sampling in two dtypes."""
    pytest.importorskip("triton")
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH", ""), str(CUBINS.parents[2])) if part)
    environment = {**os.environ, "BENCHMARK_RESULTS": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, CUBINS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads((tmp_path / "cubins.json").read_text())["figures"]
    assert len({name.partition(": ")[0] for name in figures}) == 2 * (3 + 2 * 2 + 2)
    assert [f"{name} {figure['value']}" for name, figure in figures.items() if not figure["met"]] == []
