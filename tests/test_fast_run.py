"""Tests ``pytest --fast`` on a file of small tests, in a pytest session of its own.

Not proven: that a test is skipped if it starts a process on another thread.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import multiprocessing, os, subprocess, sys
import pytest

@pytest.fixture(scope="session")
def started():
    return subprocess.run(["true"])

def test_starts_nothing(): pass
def test_popen(): subprocess.run(["true"])
def test_fork():
    if os.fork() == 0: os._exit(0)
def test_spawn(): multiprocessing.get_context("spawn").Process(target=print).start()
def test_fixture(started): pass
def test_fixture_again(started): pass
def test_import_that_asks_the_system(): import asks_the_system
def test_fails(): assert False
"""


def test_what_starts_a_process_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "asks_the_system.py").write_text("import subprocess\nsubprocess.run(['true'], check=True)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "fast_run", "-p", "no:cacheprovider", "--fast", "-v", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    ended = dict(re.findall(r"::test_(\w+) (PASSED|SKIPPED|FAILED)", done.stdout))
    assert ended == {
        "starts_nothing": "PASSED",
        "popen": "SKIPPED",
        "fork": "SKIPPED",
        "spawn": "SKIPPED",
        "fixture": "SKIPPED",
        "fixture_again": "SKIPPED",
        "import_that_asks_the_system": "PASSED",
        "fails": "FAILED",
    }, done.stdout


def test_a_skipped_test_ends_without_an_error() -> None:
    """A fixture's clean-up does not fail if the test was skipped before it made what is cleaned up.

    The inner pytest session looks for processes that it has left behind itself, not for those of this session.
    """
    root = Path(__file__).parents[1]
    texts = {file: file.read_text() for file in root.glob("tests/*/test_*.py")}
    files = [file for file, text in texts.items() if "subprocess" in text and "\n    yield" in text]
    assert root / "tests/runtime/test_watchdog.py" in files
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fast", "-m", "not slow and not gpu", *files]
    environment = {name: value for name, value in os.environ.items() if name != "OR1_TEST_SESSION"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
