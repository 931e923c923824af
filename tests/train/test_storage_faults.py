"""A run on a disk that hangs and later breaks, under a clock that jumps: a real ext4 on a loop device. Needs root.

Not proven here: a network file system, whose hangs and errors may look different to a process; and the clock of what is
not Python, which does not jump here (Ray's own programs, torch).
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from training import PATIENCE_S, Training, checkpoint_steps, faults, process_of, read_rows, wait_for_rows
from waiting import wait_until

DAY_S = 86400.0


class Disk:
    """An ext4 file system on a loop device."""

    def __init__(self, folder: Path) -> None:
        self.root, self._memory = folder / "disk", folder / "memory"
        self._image, self._saved = self._memory / "image", self._memory / "saved"

    def make(self) -> None:
        for place in (self.root, self._memory):
            place.mkdir()
        command("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(self._memory))
        with self._image.open("wb") as image:
            image.truncate(4 << 30)
        command("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        self.mount()

    def mount(self) -> None:
        command("mount", "-o", "loop", str(self._image), str(self.root))

    def freeze(self) -> None:
        """From now on whoever writes waits, in state D."""
        command("fsfreeze", "-f", str(self.root))

    def thaw(self) -> None:
        command("fsfreeze", "-u", str(self.root))

    def break_down(self) -> None:
        """Have the device refuse what lies behind its first MiB, with EIO."""
        self.freeze()
        command("cp", "--sparse=always", str(self._image), str(self._saved))
        device = command("findmnt", "-n", "-o", "SOURCE", str(self.root)).strip()
        os.truncate(self._image, 1 << 20)
        command("losetup", "--set-capacity", device)
        self.thaw()

    def mend(self) -> None:
        """Mount the disk as it was when it broke; ext4 repairs itself from its journal."""
        command("umount", str(self.root))
        self._saved.replace(self._image)
        self.mount()

    def remove(self) -> None:
        for words in (["fsfreeze", "-u", self.root], ["umount", "-l", self.root], ["umount", "-l", self._memory]):
            subprocess.run(list(map(str, words)), capture_output=True, check=False)


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    try:
        made.make()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        made.remove()
        pytest.skip(f"cannot make a disk here (needs root and loop devices): {error}")
    yield made
    made.remove()


class Clock:
    """How far Python's clock of the day is ahead in the run's processes (tests/train/sabotage)."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.jump(0.0)

    def jump(self, ahead_s: float) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("d", ahead_s))


def wait_for_a_writer(rank: int) -> None:
    """Wait until a thread of the rank hangs in the disk."""

    def hangs() -> bool:
        stats = [Path(f"/proc/{rank}/task/{thread.id}/stat") for thread in psutil.Process(rank).threads()]
        return any(s.exists() and s.read_text().rpartition(")")[2].split()[0] == "D" for s in stats)

    wait_until(hangs, "a thread to wait for the disk", PATIENCE_S)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_disk_that_hangs_and_breaks_and_a_clock_that_jumps(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path, disk: Disk
) -> None:
    """A hang and jumps of the clock end nothing. A broken disk ends the run with the file and the reason; mended, the
    same command goes on from what was saved before."""
    clock, run = Clock(tmp_path), disk.root / "run"
    overrides = ["run.max_restarts=3", "cluster.heartbeat_s=6", "stages.1.steps=15", "checkpoint.keep_last=100"]
    sabotage = {"SABOTAGE": "clock", "SABOTAGE_FOLDER": str(tmp_path)}
    training = train(small_config(run), *overrides, **sabotage)

    wait_for_rows(training, run, 2)
    disk.freeze()
    wait_for_a_writer(process_of(run, "rank 0"))
    before = len(read_rows(run / "metrics.jsonl"))
    time.sleep(20.0)  # the fault itself: more than three times heartbeat_s
    assert len(read_rows(run / "metrics.jsonl")) == before
    disk.thaw()
    wait_for_rows(training, run, before + 1)
    for ahead_s in (DAY_S, -DAY_S, 0.0):
        clock.jump(ahead_s)
        wait_for_rows(training, run, len(read_rows(run / "metrics.jsonl")) + 1)
    assert faults(run) == []

    disk.break_down()
    status, output = training.finish()
    assert status == 2, output[-6000:]
    said = output.splitlines()[-1]  # ext4 answers with EIO, is read-only after that, or has no buffer for such a block
    assert re.search(r"\[Errno (5|12|30)\]", said) and str(disk.root) in said, output[-6000:]
    assert training.survivors() == []
    disk.mend()
    saved = checkpoint_steps(run)
    assert max(saved) >= before
    again = train(small_config(run), *overrides, **sabotage)
    status, output = again.finish()
    assert status == 0, output[-6000:]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(19))
