"""Runs functions of test modules on several ranks, which are forks of a warm process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIMEOUT_S = 800.0
"""A hang is reported after this time. No test depends on how long its ranks take."""

_servers: dict[str, subprocess.Popen[str]] = {}


def environment() -> dict[str, str]:
    """Return variables with which a process finds the modules of the tests."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def job(
    function: Callable[..., Any], ranks: int, *arguments: Any, folder: Path, joined: bool = True, watched: bool = True
) -> dict[str, Any]:
    """Return a job for ``rank_server``: a call of a test module's function on every rank. No other job may use
    ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call").write_bytes(pickle.dumps((function, arguments)))
    return {"ranks": ranks, "folder": str(folder), "joined": joined, "watched": watched, "timeout_s": TIMEOUT_S}


def run_jobs(jobs: Sequence[dict[str, Any]], server: str = "rank_server.py") -> list[dict[str, Any]]:
    """Run jobs at the same time; return the ``ends`` and ``outputs`` by rank of each job."""
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


def returned(job: dict[str, Any]) -> list[Any]:
    """Return, by rank, the results of a job's function. The job must have ended without error."""
    return [pickle.loads(Path(job["folder"], f"{rank}.returned").read_bytes()) for rank in range(job["ranks"])]


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    """End the rank servers with the session. The conftest of each folder that uses them imports this fixture."""
    yield
    while _servers:
        _servers.popitem()[1].communicate()


def call(
    function: Callable[..., Any], ranks: int, *arguments: Any, joined: bool = True, server: str = "rank_server.py"
) -> list[Any]:
    """Call a function, which must succeed, on every rank; return its results by rank.

    ``joined``: the ranks have a process group before the function begins.
    """
    with tempfile.TemporaryDirectory() as folder:
        only = job(function, ranks, *arguments, folder=Path(folder), joined=joined)
        (result,) = run_jobs([only], server)
        output = "\n".join(result["outputs"])
        assert result["ends"] == [0] * ranks, f"{result['ends']}\n{output[-4000:]}"
        return returned(only)
