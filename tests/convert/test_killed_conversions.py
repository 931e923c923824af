"""Conversions that are killed at any moment leave nothing that looks whole, and the same command makes it anew.

Not proven here: that a disk keeps what was synced when the power fails.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import ranks
from rich.console import Console

from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron

KILLS = 4
QUIET = Console(quiet=True)
FILE_BYTES = 30_000
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def life(convert: Any, folder: Path, operation: int) -> int:
    """Convert in a fork, which is killed as it is about to change its n-th file below ``folder``; its exit status."""
    pid = os.fork()
    if pid == 0:
        done = 0

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal done
            if event in EVENTS and str(folder) in f"{arguments[0]}":
                done += 1
                if done == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        code = 1
        try:
            convert()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def convert_and_die(hf: Path, scratch: Path) -> None:
    """Convert there and back, killed at random operations, until all is done."""
    chance = random.Random(5)
    megatron, back = scratch / "megatron", scratch / "back"
    ways = {
        megatron: lambda: hf_to_megatron(hf, megatron, QUIET, file_bytes=FILE_BYTES),
        back: lambda: megatron_to_hf(megatron, back, QUIET),
    }
    for out, convert in ways.items():
        for _ in range(KILLS):
            assert life(convert, scratch, chance.randint(1, 12)) == -signal.SIGKILL
            assert not out.exists()
        assert life(convert, scratch, 0) == 0


def test_killed_at_random_operations(make_model: Any, tmp_path: Path) -> None:
    """The HF folder that comes back is the source, byte for byte, and nothing is left beside the two."""
    hf, scratch = make_model(tmp_path / "hf", "Qwen2ForCausalLM"), tmp_path / "scratch"
    scratch.mkdir()
    ranks.call(convert_and_die, 1, hf, scratch, joined=False)
    assert sorted(path.name for path in scratch.iterdir()) == ["back", "megatron"]
    names = sorted(path.name for path in hf.iterdir())
    assert sorted(path.name for path in (scratch / "back").iterdir()) == names
    for name in names:
        assert (scratch / "back" / name).read_bytes() == (hf / name).read_bytes(), name
