"""Implements ``pytest --fast`` (``make test-fast``), which skips each test at the point where it starts a process.

Tests need no mark for it. Engines, Ray, trainer ranks, sandboxes and verifiers' processes all count as processes. If a
session fixture starts a process, every test that needs the fixture is skipped.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
from types import FrameType
from typing import Any

import pytest

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "multiprocessing"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="skip each test at the point where it starts a process")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        # "spawn" of multiprocessing is the one way that Python tells no audit hook about
        multiprocessing.util.spawnv_passfds = lambda *_: sys.audit("multiprocessing")  # type: ignore[assignment]
        sys.addaudithook(_skip)


def _skip(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and "PYTEST_CURRENT_TEST" in os.environ and not _importing():
        pytest.skip(f"starts a process ({event}), which --fast leaves out")


def _importing() -> bool:
    """Return whether a module is being imported. Some libraries run ``uname`` then, which skips no test."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
