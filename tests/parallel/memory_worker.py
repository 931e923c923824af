"""A loop on two ranks that saves in memory after each step, and whose ranks are all killed at a named moment.

    memory_worker.py OUT MODEL FOLDER ROLLOUTS SEED MOMENT

MOMENT: "write": rank 1 is within its part of the checkpoint of step 4; "manifest": all of it but the manifest is there;
"after": it is whole, and so is the next one; "" none: the run comes to its end, and rank 0 writes JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_worker import RecordedRollouts, Run

from or1_megatron.parallel import saver, shard_files
from or1_megatron.parallel.mesh import start_process_group, stop_process_group

DEADLY = "step_000004"
MIDDLE = 20  # writes to the file; there are hundreds


def kill_all(pids: list[int]) -> None:
    """Kill the ranks, this one last."""
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def die(moment: str, pids: list[int], run: Run) -> None:
    rank, write, write_manifest = dist.get_rank(), shard_files._DigestedFile.write, saver.write_manifest
    writes = 0

    def counted(self: Any, data: Any) -> int:
        nonlocal writes
        writes += DEADLY in self._file.name
        if writes == MIDDLE:
            kill_all(pids)
        return write(self, data)

    def no_manifest(folder: Path, known: Any) -> None:
        if DEADLY in folder.name:
            kill_all(pids)
        write_manifest(folder, known)

    if moment == "write" and rank == 1:
        shard_files._DigestedFile.write = counted  # type: ignore[method-assign]
    if moment == "manifest" and rank == 0:
        saver.write_manifest = no_manifest
    if moment == "after" and rank == 0:
        report = run.loop.ports.tracker.log

        def log(step: int, row: Any) -> None:
            if step == 6:
                kill_all(pids)
            report(step, row)

        run.diary.log = log  # type: ignore[method-assign]


class PatientRollouts(RecordedRollouts):
    """Rollouts that take until the checkpoint of the step before is written, as they do in a real run."""

    run: Run

    def wait_decoded(self, ticket: int | None = None) -> None:
        if self.run.saver._thread is not None:
            self.run.saver._thread.join()
        super().wait_decoded(ticket)


def main() -> None:
    out, model, folder, rollouts = map(Path, sys.argv[1:5])
    torch.set_num_threads(1)
    start_process_group(60)
    run = Run(model, {"ranks": 2}, folder, rollouts, int(sys.argv[5]), every_steps=100)
    if dist.get_rank() == 0:
        run.rollouts.__class__ = PatientRollouts
        run.rollouts.run = run  # type: ignore[attr-defined]
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    die(sys.argv[6], pids, run)
    told = run.to_the_end()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(told))
    stop_process_group()


if __name__ == "__main__":
    main()
