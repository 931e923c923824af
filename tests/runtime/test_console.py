"""Real processes outlive their console, whatever becomes of it. The trainer's own are tried by hand: a test would take
minutes to prove no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

from or1_megatron.runtime import process_environment
from or1_verify.errors import UserError

PROGRAM = """
import logging, os, sys, time
from pathlib import Path
from or1_megatron.runtime import console
folder = Path(sys.argv[1])
logging.basicConfig(filename=folder / "log", level=logging.INFO)
console._PATIENCE_S = float(sys.argv[2])
console.outlive_console()
console.native_lines_to(folder / "native")
os.write(2, b"a frame of C++\\n")
print("é", file=sys.stderr)
(folder / "up").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
for _ in range(100):
    print("é" * 1000, flush=True)
    print("é" * 1000, file=sys.stderr)
(folder / "done").write_text(str(sys.stdout.isatty()))
"""


@pytest.mark.parametrize("how", ["read", "pipe", "full", "closed", "unread", "terminal"])
def test_a_process_outlives_its_console(how: str, tmp_path: Path) -> None:
    patience_s = PATIENCE_S if how == "read" else 0.1
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(patience_s)]
    read, write = os.openpty() if how == "terminal" else os.pipe()
    if how == "full":
        write = os.open("/dev/full", os.O_WRONLY)
    if how == "closed":
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    out = {} if how == "read" else {"PYTHONIOENCODING": "ascii"}
    stdout, stderr = (subprocess.PIPE, subprocess.PIPE) if how == "read" else (write, write)
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **out})
    wait_until((tmp_path / "up").exists, "the program")
    if how in ("pipe", "terminal"):
        os.close(write)
        os.close(read)
    (tmp_path / "go").touch()
    said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert (tmp_path / "native").read_text() == "a frame of C++\n"
    lost = (tmp_path / "log").read_text().count("the console takes no lines any more")
    if how == "read":
        assert [text.decode().count("é") for text in said] == [100_000, 100_001] and lost == 0
    else:
        assert (tmp_path / "done").exists() and lost == (0 if how == "closed" else 2)


def test_the_environment_is_made_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TMPDIR as Slurm makes it, a home that is not there, and a limit of open files that cannot be raised."""
    long = tmp_path / ("job" * 20)
    long.mkdir()
    for name, value in {"TMPDIR": long, "RAY_TMPDIR": "/r", "HOME": tmp_path / "gone"}.items():
        monkeypatch.setenv(name, str(value))
    said = process_environment.make_usable()
    assert len(said) == 2 and said[0].startswith(f"TMPDIR={long} is too long") and str(tmp_path / "gone") in said[1]
    assert "TMPDIR" not in os.environ and os.environ["RAY_TMPDIR"] == "/r" and Path(os.environ["HOME"]).is_dir()
    assert process_environment.make_usable() == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments: True")
    with pytest.raises(UserError, match=r"PYTORCH_ALLOC_CONF=.*: a handoff shares GPU memory .*: take it out"):
        process_environment.make_usable()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    with monkeypatch.context() as patched:
        patched.setattr(process_environment.os, "access", lambda path, _: path != "/dev/shm")
        with pytest.raises(UserError, match="/dev/shm cannot be written"):
            process_environment.make_usable()
    monkeypatch.setattr(process_environment.resource, "getrlimit", lambda _: (256, 512))
    with pytest.raises(UserError, match="may open 512 files here, and a run needs 1024: raise ulimit -n"):
        process_environment.make_usable()
