"""Under torchrun: verbs that work, raise, stall or die on a chosen rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from or1_megatron.config import ParallelConfig
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group

VICTIM = 1
DEADLINE_S = 3.0


def verbs(mesh: Mesh) -> dict[str, Any]:
    def add(shared: int, mine: Any) -> float:
        total = torch.tensor(float(shared + mine.sum()))
        dist.all_reduce(total, group=mesh.control)
        return total.item()

    def raise_there(shared: Any, mine: Any) -> None:
        if mesh.rank == VICTIM:
            raise KeyError("the tensor that was not there")
        dist.barrier(mesh.control)

    def stall_there(shared: Any, mine: Any) -> None:
        if mesh.rank == VICTIM:
            time.sleep(600)
        dist.barrier(mesh.control)

    def die_there(shared: Any, mine: Any) -> None:
        if mesh.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier(mesh.control)

    return {"add": add, "raise": raise_there, "stall": stall_there, "die": die_there}


def main() -> None:
    verb, pid_folder = sys.argv[1], Path(sys.argv[2])
    start_process_group(120)
    mesh = build_mesh(ParallelConfig(ranks=int(os.environ["WORLD_SIZE"])), seed=1)
    (pid_folder / str(mesh.rank)).write_text(str(os.getpid()))
    lockstep = Lockstep(mesh, verbs(mesh), DEADLINE_S)
    if mesh.rank > 0:
        lockstep.serve()
    else:
        print("sum", lockstep.call("add", 1, [np.arange(3) * (i + 1) for i in range(mesh.data)]))
        if verb == "driver dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb != "none":
            lockstep.call(verb)
        lockstep.close()
    stop_process_group()


if __name__ == "__main__":
    main()
