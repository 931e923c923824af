"""Sets up every test session: no network, few threads, no GPU tests without a GPU, and no process left behind."""

from __future__ import annotations

import os
import sys
import time
import uuid
from typing import Any

import psutil
import pytest

pytest_plugins = ["engine_fixtures", "fast_run", "tiny_models"]

# Set before anything imports torch or a tokenizer. The tests share the cores with the processes that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch's stores look up the name of every peer. A name server that drops one of many questions costs 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")


_LONG = ("examples", "train", "handoff", "rollout", "parallel", "selftest")
"""Folders whose tests run longest. Their files come first, so that no worker starts one when others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = {f"tests/{name}": place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: folders.get(item.nodeid.partition("::")[0].rpartition("/")[0], len(folders)))
    wanted = [item for item in items if "gpu" in item.keywords]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, give a worker all tests of a file, or of a folder whose tests share engines."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            return folder if folder in ("tests/handoff", "tests/rollout") else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


# Every process that a test starts inherits this variable, also when its parent has died.
_MARK = "OR1_TEST_SESSION"
_SESSION = os.environ.setdefault(_MARK, uuid.uuid4().hex)


def _left_behind() -> list[psutil.Process]:
    alive = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(_MARK) == _SESSION
            if not marked or process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if "resource_tracker" in " ".join(process.cmdline()):  # Python's own; it ends with this process
                continue
            alive.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return alive


def _described(process: psutil.Process) -> str:
    """Return a process's id, state, the test that started it (or its ancestor), and its command line."""
    try:
        test = process.environ().get("PYTEST_CURRENT_TEST", "no test")
        return f"{process.pid} [{process.status()}] {test}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error as gone:
        return f"{process.pid} {gone}"


_report = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a process that a test started still lives after all fixtures are torn down.

    With pytest-xdist, the process that started the workers checks this after they have ended.
    """
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + 300.0  # Ray's daemons take some seconds to go after ray.shutdown()
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    session.config.stash[_report] = [_described(process) for process in left]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the processes left behind, after the summary of the tests: even then all tests may have passed."""
    if lines := config.stash.get(_report, []):
        print("\nfailed: processes left behind by the tests:", *lines, sep="\n  ", file=sys.stderr)
