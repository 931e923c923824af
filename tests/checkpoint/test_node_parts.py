"""Checkpoints in the memory of several nodes: each has a part and a copy of another's, and the loss of one costs none.

Nodes are ranks with folders of their own. Not proven here: that launchers bring the parts together
(tests/examples/test_recipe_scripts.py), and nodes with several ranks each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import problem
import pytest
import ranks
import torch
import torch.distributed as dist

from or1_megatron.checkpoint import memory_folder, node_copies, saver
from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.loader import load
from or1_megatron.checkpoint.memory_folder import (
    bring_part,
    bring_to_disk,
    make_memory_folder,
    memory_keeper,
    part_folder,
)


def lose_a_node(model: Path, folder: Path, lost: int) -> dict[str, Any]:
    """Save in memory on pretended nodes of one rank each; lose a node; load on all ranks.

    ``folder``/shm_N stands for /dev/shm of node N. After three saves and changes to the parameters, the nodes other
    than ``lost`` bring their parts to the disk, rank 0 puts them together, and all load that.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    rank, world = dist.get_rank(), dist.get_world_size()
    shm, disk = folder / f"shm_{rank}", folder / "run" / "checkpoints"
    shm.mkdir(parents=True)
    node_copies.PIECE_BYTES = 10_007  # type: ignore[misc]
    saver.SHARED_MEMORY = memory_folder.SHARED_MEMORY = shm  # type: ignore[misc]
    policy = problem.make_policy(model, ranks=world)
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.module.parameters()]
    names = [""]
    if rank == 0:
        disk.mkdir(parents=True)
        names = [make_memory_folder(disk).name]
    dist.broadcast_object_list(names)
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
    return {"folders": folders, "state": state, "values": values, "left": [path.name for path in shm.iterdir()]}


@pytest.mark.parametrize("lost", [2, -1])
def test_a_lost_nodes_part_is_on_the_next_one(tiny_qwen2: Path, tmp_path: Path, lost: int) -> None:
    nodes = ranks.call(lose_a_node, 3, tiny_qwen2, tmp_path, lost)
    assert nodes[0]["state"] == {"step": 3}
    assert nodes[0]["values"] == [3.0]
    assert nodes[0]["left"] == []
    first, *others = (node["folders"] for node in nodes)
    assert first.keys() <= {"step_000003", "step_000002.partial"}  # deleted by a thread
    assert {"__0_0.distcp", "__2_0.distcp", "manifest.json", "loop.json"} <= set(first["step_000003"])
    for rank, parts in enumerate(others, start=1):
        expected = [f"__{node}_0.distcp" for node in (rank - 1, rank)]
        assert parts == {"step_000002.partial": expected, "step_000003.partial": expected}
