"""Two ranks that are killed lose the step under way, and no more: they go on from the checkpoint in shared memory.

Not proven here: that the launcher starts them again (tests/train/test_keeps_running.py), and GPUs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ranks
import torch.distributed as dist
from recorded_run import RecordedRollouts, Run

from or1_megatron.checkpoint import saver, shard_files
from or1_megatron.checkpoint.memory_folder import make_memory_folder, memory_keeper, remove_memory_folder

MOMENTS = {"write": 3, "manifest": 3, "after": 5}
"""The newest whole checkpoint after the kill."""


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


def train(model: Path, folder: Path, rollouts: Path, seed: int, moment: str) -> dict[str, Any] | None:
    """Run a loop that saves in memory after each step, and kill both ranks at a moment, if it is one of ``MOMENTS``.

    "write": rank 1 is within its part of the checkpoint of step 4; "manifest": all of it but the manifest is there;
    "after": it is whole, and so is the next one.
    """
    run = Run(model, {"ranks": 2}, folder, rollouts, seed, every_steps=100)
    if dist.get_rank() == 0:
        run.rollouts.__class__ = PatientRollouts
        run.rollouts.run = run  # type: ignore[attr-defined]
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    die(moment, pids, run)
    return run.to_the_end()


def test_killed_ranks_go_on_from_memory_to_the_bit(tiny_qwen2: Path, tmp_path: Path) -> None:
    """SIGKILL of both ranks in the middle of the write of step 4 to memory, before its manifest, and within step 6. No
    checkpoint is on disk. What follows equals the undisturbed run: metrics, the loop's state, and on each rank
    parameters, moments and generators; each start has another seed."""

    def start(folder: str, seed: int, killed_at: str = "") -> dict[str, Any]:
        arguments = (tiny_qwen2, tmp_path / folder, tmp_path / "rollouts.pickle", seed, killed_at)
        return ranks.job(train, 2, *arguments, folder=tmp_path / "jobs" / f"{folder} {seed}")

    first = start("whole", 1)
    (done,) = ranks.run_jobs([first])
    assert done["ends"] == [0, 0], done["outputs"]
    whole = ranks.returned(first)[0]
    folders = {moment: tmp_path / moment / "checkpoints" for moment in MOMENTS}
    try:
        for folder in folders.values():
            folder.mkdir(parents=True)
            make_memory_folder(folder)
        for done in ranks.run_jobs([start(moment, 1, moment) for moment in MOMENTS]):
            assert done["ends"] == [-signal.SIGKILL] * 2, done["outputs"]
        for moment, folder in folders.items():
            keeper = memory_keeper(folder)
            assert keeper is not None
            assert [path.name for path in keeper.complete()][-1] == f"step_00000{MOMENTS[moment]}"
            assert len(list(keeper.folder.iterdir())) <= 2  # generations, whole or torn
        resumes = {moment: start(moment, 7) for moment in MOMENTS}
        for done in ranks.run_jobs(list(resumes.values())):
            assert done["ends"] == [0, 0], done["outputs"]
    finally:
        for folder in folders.values():
            remove_memory_folder(folder)
    for moment, step in MOMENTS.items():
        resumed = ranks.returned(resumes[moment])[0]
        assert resumed["rows"] == {later: whole["rows"][later] for later in range(step + 1, 7)}, moment
        assert resumed["digests"] == whole["digests"], moment
        assert resumed["state"] == whole["state"], moment
