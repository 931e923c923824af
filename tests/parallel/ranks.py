"""Runs worker scripts on several ranks: as forks of a warm process, or under torchrun as a user's training runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PATHS = os.pathsep.join(map(str, (ROOT, FOLDER, ROOT / "tests" / "rl")))
TIMEOUT_S = 240.0
"""A hang is reported after this long; no test depends on how long its ranks take."""

_server: subprocess.Popen[str] | None = None


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def job(script: str, ranks: int, *arguments: str, folder: Path, watched: bool = True) -> dict[str, Any]:
    """Describe a run of ``tests/parallel/<script>``, or of a script with an absolute path (``rank_server``)."""
    told = {"script": str(FOLDER / script), "arguments": arguments, "ranks": ranks, "folder": str(folder)}
    return {**told, "watched": watched, "timeout_s": TIMEOUT_S}


def run_jobs(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs at the same time, as forks; return each one's ``ends`` and ``outputs`` by rank."""
    global _server
    if _server is None:
        command = [sys.executable, str(FOLDER / "rank_server.py")]
        _server = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert _server.stdin is not None and _server.stdout is not None
    print(json.dumps(jobs), file=_server.stdin, flush=True)
    answer = _server.stdout.readline()
    assert answer, "the rank server ended; its output is above"
    results: list[dict[str, Any]] = json.loads(answer)
    return results


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    """Ends the rank server with the session; the conftest of each folder that uses it imports this."""
    global _server
    yield
    if _server is not None:
        _server.communicate()
        _server = None


def run_json(script: str, ranks: int, out: Path, *arguments: str) -> Any:
    """Run a script that must succeed and writes JSON to ``out`` (its first argument)."""
    with tempfile.TemporaryDirectory() as folder:
        (result,) = run_jobs([job(script, ranks, str(out), *arguments, folder=Path(folder))])
    output = "\n".join(result["outputs"])
    assert result["ends"] == [0] * ranks, f"{result['ends']}\n{output[-4000:]}"
    return json.loads(out.read_text())


def run(script: str, ranks: int, *arguments: str) -> tuple[int, str]:
    """Run a script under torchrun; (exit status, stdout and stderr together)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(FOLDER / script), *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stdout
