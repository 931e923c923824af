"""``killed_conversions.py OUT HF FOLDER KILLS SEED``: conversions there and back, each life a forked process that is
killed with SIGKILL at a random operation, until one life ends by itself. JSON: how often each direction was killed, how
often a life resumed with files of an earlier one, and what was left in the folder."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from or1_megatron.convert.job import Job
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron

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


def killed_until_done(convert: Callable[[], None], out: Path, kills: int, chance: random.Random) -> dict[str, int]:
    log = out.with_name(out.name + ".log")
    assert life(convert, log, 0) == 0
    operations = int(log.read_text())
    count = 0
    while True:
        if out.exists():  # the last life was done before it was killed: start over
            remove(out)
        last = count == kills
        status = life(convert, log, 0 if last else chance.randint(1, operations))
        assert status in (0, -signal.SIGKILL), status
        count += status != 0
        if last:
            resumed = log.with_suffix(".resumed").read_text().split()
            return {"kills": count, "resumed": sum(int(line) > 0 for line in resumed)}


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def main() -> None:
    out, hf, scratch, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:])
    chance, quiet = random.Random(seed), Console(quiet=True)
    first, megatron, back = scratch / "first", scratch / "megatron", scratch / "back"
    hf_to_megatron(hf, first, quiet, file_bytes=FILE_BYTES)

    def there() -> None:
        hf_to_megatron(hf, megatron, quiet, file_bytes=FILE_BYTES)

    def again() -> None:
        megatron_to_hf(first, back, quiet, shard_bytes=FILE_BYTES)

    told: dict[str, object] = {
        "there": killed_until_done(there, megatron, kills, chance),
        "back": killed_until_done(again, back, kills, chance),
    }
    out.write_text(json.dumps({**told, "left": sorted(path.name for path in scratch.iterdir())}))


if __name__ == "__main__":
    main()
