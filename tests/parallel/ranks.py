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
PATHS = os.pathsep.join(map(str, (ROOT, FOLDER, ROOT / "tests", ROOT / "tests" / "rl")))
TIMEOUT_S = 600.0
"""A hang is reported after this long; no test depends on how long its ranks take."""

_servers: dict[str, subprocess.Popen[str]] = {}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def job(script: str, ranks: int, *arguments: str, folder: Path, watched: bool = True) -> dict[str, Any]:
    """Describe a run of ``tests/parallel/<script>``, or of a script with an absolute path (``rank_server``)."""
    told = {"script": str(FOLDER / script), "arguments": arguments, "ranks": ranks, "folder": str(folder)}
    return {**told, "watched": watched, "timeout_s": TIMEOUT_S}


def run_jobs(jobs: Sequence[dict[str, Any]], server: str = "rank_server.py") -> list[dict[str, Any]]:
    """Run jobs at the same time, as forks of a server; return each one's ``ends`` and ``outputs`` by rank."""
    if server not in _servers:
        command = [sys.executable, str(FOLDER / server)]
        _servers[server] = subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    process = _servers[server]
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(jobs), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the rank server ended; its output is above"
    results: list[dict[str, Any]] = json.loads(answer)
    return results


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    """Ends the rank servers with the session; the conftest of each folder that uses them imports this."""
    yield
    while _servers:
        _servers.popitem()[1].communicate()


def run_json(script: str, ranks: int, out: Path, *arguments: str, server: str = "rank_server.py") -> Any:
    """Run a script that must succeed and writes JSON to ``out`` (its first argument)."""
    with tempfile.TemporaryDirectory() as folder:
        (result,) = run_jobs([job(script, ranks, str(out), *arguments, folder=Path(folder))], server)
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
