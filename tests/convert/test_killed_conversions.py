"""Conversions that are killed at any moment resume with the same command, with the result of an uninterrupted one.

Not proven here: that a disk keeps what was synced when the power fails.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ranks
import torch
from rich.console import Console
from safetensors.torch import load_file

from or1_megatron.convert.job import Job
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron

KILLS = 8
QUIET = Console(quiet=True)
FILE_BYTES = 30_000
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def die_at(operation: int, folder: Path, log: Path) -> Callable[[], None]:
    """Kill this process as it is about to do its n-th operation: a write, or a change of a file below ``folder``.

    Returns what notes the number of operations done so far.
    """
    done = 0
    progress = Job.progress

    def count() -> None:
        nonlocal done
        done += 1
        if done == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def counted(self: Job, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        with progress(self, label, total_bytes) as advance:
            yield lambda written: (count(), advance(written))[1]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(folder) in f"{arguments[0]}":
            count()

    Job.progress = counted  # type: ignore[assignment,method-assign]
    sys.addaudithook(audit)
    return lambda: print(done, file=log.open("a"))


def life(convert: Callable[[], None], log: Path, operation: int) -> int:
    """One life, which is killed at an operation; its exit status, negative if it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        enter = Job.__enter__

        def noted(job: Job) -> Job:
            enter(job)
            with log.with_suffix(".resumed").open("a") as file:  # how much was there already
                file.write(f"{len(job.done)}\n")
            return job

        Job.__enter__ = noted  # type: ignore[method-assign]
        try:
            note = die_at(operation, log.parent, log)
            convert()
            note()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_until_done(convert: Callable[[], None], out: Path, chance: random.Random) -> tuple[int, int]:
    """Return how often it was killed, and how often a life resumed with files of an earlier one."""
    log = out.with_name(out.name + ".log")
    assert life(convert, log, 0) == 0
    operations = int(log.read_text())
    count = 0
    while True:
        if out.exists():  # the last life was done before it was killed: start over
            shutil.rmtree(out)
        last = count == KILLS
        status = life(convert, log, 0 if last else chance.randint(1, operations))
        assert status in (0, -signal.SIGKILL), status
        count += status != 0
        if last:
            resumed = log.with_suffix(".resumed").read_text().split()
            return count, sum(int(line) > 0 for line in resumed)


def convert_and_die(hf: Path, scratch: Path, seed: int) -> list[tuple[int, int]]:
    """Convert there and back, each life a forked process that is killed with SIGKILL at a random operation, until one
    life ends by itself. Returns what ``killed_until_done`` does of both directions."""
    chance = random.Random(seed)
    first, megatron, back = scratch / "first", scratch / "megatron", scratch / "back"
    hf_to_megatron(hf, first, QUIET, file_bytes=FILE_BYTES)

    def there() -> None:
        hf_to_megatron(hf, megatron, QUIET, file_bytes=FILE_BYTES)

    def again() -> None:
        megatron_to_hf(first, back, QUIET, shard_bytes=FILE_BYTES)

    return [killed_until_done(there, megatron, chance), killed_until_done(again, back, chance)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_killed_at_random_operations(make_model: Any, tmp_path: Path) -> None:
    """The checkpoint's files are those of an uninterrupted conversion, the HF folder's tensors those of the source;
    several lives resumed with files of earlier ones, and nothing is left beside the two."""
    hf, scratch = make_model(tmp_path / "hf", "Qwen2ForCausalLM"), tmp_path / "scratch"
    scratch.mkdir()
    for killed, resumed in ranks.call(convert_and_die, 1, hf, scratch, 5, joined=False)[0]:
        assert killed == KILLS and resumed > 0
    logs = ["back.log", "back.resumed", "megatron.log", "megatron.resumed"]
    assert sorted(path.name for path in scratch.iterdir()) == sorted(["back", "first", "megatron", *logs])
    names = sorted(path.name for path in (scratch / "first").iterdir())
    assert names == sorted(path.name for path in (scratch / "megatron").iterdir()) and len(names) > 10
    for name in names:
        if name.endswith(".distcp"):
            assert (scratch / "first" / name).read_bytes() == (scratch / "megatron" / name).read_bytes(), name
    megatron_to_hf(scratch / "megatron", tmp_path / "again", QUIET)
    source = tensors(hf)
    for folder in (scratch / "back", tmp_path / "again"):
        back = tensors(folder)
        assert source.keys() == back.keys() and all(torch.equal(source[name], back[name]) for name in source)
