"""Ranks on pretended nodes, one each with a shared memory of its own, save in memory; a node is lost; one loads.

    node_parts_worker.py OUT MODEL FOLDER LOST

FOLDER/shm_N stands for /dev/shm of node N. After three saves and changes to the parameters, the nodes other than LOST
bring their parts to the disk, rank 0 puts them together, and all load that. Rank 0 writes JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel import node_copies, saver
from or1_megatron.parallel.checkpoint import load
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.runtime import memory_folder
from or1_megatron.runtime.memory_folder import bring_part, bring_to_disk, make_memory_folder, memory_keeper, part_folder
from or1_megatron.runtime.run_folder import CheckpointKeeper


def main() -> None:
    out, model, folder, lost = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    start_process_group(60)
    rank, world = dist.get_rank(), dist.get_world_size()
    shm, disk = folder / f"shm_{rank}", folder / "run" / "checkpoints"
    shm.mkdir(parents=True)
    node_copies.PIECE_BYTES = 10_007  # type: ignore[misc]
    saver.SHARED_MEMORY = memory_folder.SHARED_MEMORY = shm  # type: ignore[misc]
    parallel = ParallelConfig(ranks=world)
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, OptimizerConfig(), mesh)
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.module.parameters()]
    names = [""]
    if rank == 0:
        disk.mkdir(parents=True)
        names = [make_memory_folder(disk).name]
    dist.broadcast_object_list(names)
    folders = {}
    with saver.CheckpointSaver(policy) as saving:
        for step in (1, 2, 3):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.fill_(step)
            saving.save(shm / names[0] / f"step_00000{step}", {"step": step})
            with torch.no_grad():  # what is written is a copy
                for parameter in parameters:
                    parameter.fill_(-1.0)
            saving.finish(wait=True)
            if rank == 0 and (keeper := memory_keeper(disk)) is not None:
                keeper.saved(step, best=False)
            dist.barrier()
        mine = part_folder(shm / names[0] / "any", rank).parent
        folders = {path.name: sorted(file.name for file in path.iterdir()) for path in mine.iterdir()}
    found: list[object] = [None] * world
    dist.all_gather_object(found, folders)

    def others(name: str) -> None:
        for node in range(1, world):
            if node != lost:
                memory_folder.SHARED_MEMORY = folder / f"shm_{node}"  # type: ignore[misc]
                bring_part(disk, name, node)
        memory_folder.SHARED_MEMORY = shm  # type: ignore[misc]

    if rank == 0:
        keeper = CheckpointKeeper(disk, keep_last=2, keep_best=False, memory=memory_keeper(disk))
        bring_to_disk(keeper, others)
    dist.barrier()
    state = load(policy, disk / "step_000003")
    values = sorted({float(value) for parameter in parameters for value in parameter.unique()})
    if rank == 0:
        left = [path.name for path in shm.iterdir()]
        out.write_text(json.dumps({"folders": found, "state": state, "values": values, "left": left}))
    stop_process_group()


if __name__ == "__main__":
    main()
