"""Run a worker script under torchrun, as a user's training runs, and read what rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def start(script: str, ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start ``tests/parallel/<script>`` on this many ranks; stdout and stderr come together."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(FOLDER / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(script: str, ranks: int, *arguments: str, timeout_s: float = 120) -> tuple[int, str]:
    """Run to the end; (exit status, output)."""
    process = start(script, ranks, *arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"{script} on {ranks} ranks hung:\n{output[-4000:]}") from None
    return process.returncode, output


def run_json(script: str, ranks: int, out: Path, *arguments: str) -> Any:
    """Run a script that must succeed and writes JSON to ``out`` (its first argument)."""
    status, output = run(script, ranks, str(out), *arguments)
    assert status == 0, output[-4000:]
    return json.loads(out.read_text())
