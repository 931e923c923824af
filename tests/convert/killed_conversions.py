"""``python killed_conversions.py OUT HF FOLDER KILLS SEED``: conversions there and back, each life a forked process
that is killed with SIGKILL at a random time, until one life ends by itself. JSON: how often each direction was killed,
how often a life went on with files of an earlier one, and what was left lying about."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from or1_megatron.convert.job import Job
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron

FILE_BYTES = 30_000


def life(convert: Callable[[], None], log: Path, kill_after_s: float | None) -> int:
    """The process's exit status; negative: it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        entered = Job.__enter__

        def enter(job: Job) -> Job:
            entered(job)
            with log.open("a") as file:  # how much was there already
                file.write(f"{len(job.done)}\n")
            return job

        Job.__enter__ = enter  # type: ignore[method-assign]
        try:
            convert()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_until_done(convert: Callable[[], None], out: Path, kills: int, chance: random.Random) -> dict[str, int]:
    log = out.with_name(out.name + ".log")
    started_s = time.perf_counter()
    assert life(convert, log, None) == 0
    whole_s = time.perf_counter() - started_s
    count = 0
    while True:
        if out.exists():  # the last life got there before it was killed: once more
            remove(out)
        last = count == kills
        status = life(convert, log, None if last else chance.uniform(0, whole_s))
        assert status in (0, -signal.SIGKILL), status
        count += status != 0
        if last:
            return {"kills": count, "went_on": sum(int(line) > 0 for line in log.read_text().split())}


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
