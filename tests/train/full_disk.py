"""On a disk with room for one checkpoint: save, fail to save and to export, load. One JSON line for each attempt.

At last the disk becomes read-only, and the folder of checkpoints is removed, while a save is written.

The first save comes before any update, as when a run is stopped within its first step. Saves are asynchronous: each
attempt names what raised.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import problem
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.errors import AgreedError
from or1_megatron.parallel import checkpoint
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy, export_hf
from or1_megatron.parallel.saver import CheckpointSaver


def main() -> None:
    model, disk = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    start_process_group(60)
    parallel = ParallelConfig()
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(lr=1e-3), mesh)
    batch = problem.batch(1, 64)
    meanwhile: list[Callable[[], object]] = []
    saver = CheckpointSaver(policy, before_complete=lambda: [fault() for fault in meanwhile] and None)

    def update() -> float:
        return policy.update(batch.ranks[0], problem.WeightedLogProb(), batch.token_count).sums["loss"]

    def attempt(what: str, call: Callable[[], Mapping[str, Any] | None]) -> None:
        try:
            result: Any = call()
        except AgreedError as error:
            result = str(error)
        print(json.dumps([what, result, sorted(path.name for path in disk.iterdir())]), flush=True)

    saver.save(disk / "step_000000", {"step": 0})
    attempt("first save", lambda: {"written": (saver.finish(wait=True) or 0) > 0})
    before = [update(), update()]
    fill(disk, left_bytes=policy.parameter_count * 12 + 8192)  # the numbers alone would fit
    saver.save(disk / "step_000001", {"step": 1})
    attempt("writers", lambda: saver.finish(wait=True))
    saver.save(disk / "step_000001", {"step": 1})
    attempt("next save", lambda: saver.save(disk / "step_000002", {"step": 2}))
    fill(disk, left_bytes=1 << 20)
    attempt("no room", lambda: saver.save(disk / "step_000001", {"step": 1}))
    attempt("export", lambda: export_hf(policy, disk / "hf"))
    attempt("load", lambda: checkpoint.load(policy, disk / "step_000000"))
    assert [update(), update()] == before
    (disk / "fill").unlink()
    (disk / "run").mkdir()
    for what, fault in (
        ("read-only", lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)),
        ("removed", lambda: shutil.rmtree(disk / "run")),
    ):
        meanwhile[:] = [fault]
        saver.save(disk / "run" / "step_000001", {"step": 1})
        attempt(what, lambda: saver.finish(wait=True))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    meanwhile.clear()
    saver.save(disk / "run" / "step_000001", {"step": 1})
    attempt("after it", lambda: {"written": (saver.finish(wait=True) or 0) > 0})
    stop_process_group()


def fill(disk: Path, left_bytes: int) -> None:
    with (disk / "fill").open("ab") as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        file.write(bytes(free - left_bytes))


if __name__ == "__main__":
    main()
