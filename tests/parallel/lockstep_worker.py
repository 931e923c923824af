"""One rank under lockstep, as a trainer's rank is, in which a fault happens on purpose.

A case is "what rank where": what in {raise, sleep, kill, stop}, where in {verb, between}, as "kill 1 between". As a
script it runs under torchrun; ``forked_ranks`` calls ``main`` in forks of one process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.errors import AgreedError
from or1_megatron.parallel.collective_errors import raise_together
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group
from or1_megatron.runtime.signals import StopRequested

DEADLINE_S = 6.0


def fail(what: str) -> None:
    if what == "raise":
        raise KeyError("the tensor that was not there")
    if what == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    time.sleep(600)


def verbs(mesh: Mesh, what: str, victim: int) -> dict[str, Any]:
    def add(shared: int, mine: Any) -> float:
        total = torch.tensor(float(shared + mine.sum()))
        dist.all_reduce(total, group=mesh.control)
        return total.item()

    def disagree() -> None:
        raise_together(mesh, AgreedError("the disk is full") if mesh.rank == 0 else None)

    def wait() -> None:
        if mesh.rank == victim:
            fail(what)
        dist.barrier(mesh.control)

    return {"add": add, "disagree": disagree, "wait": wait}


def lead(lockstep: Lockstep, mesh: Mesh, what: str, victim: int, where: str, folder: Path) -> None:
    payloads = [np.arange(3) * (i + 1) for i in range(mesh.data)]
    try:
        lockstep.call("disagree")
    except AgreedError as error:
        print("agreed:", error, flush=True)
    print("sum", lockstep.call("add", 1, per_replica=payloads), flush=True)
    if where == "between":
        time.sleep(2)  # until all ranks are through with that verb
    if where == "verb":
        lockstep.call("wait")
    elif where == "between" and victim == 0:
        fail(what)
    elif where == "between":
        os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        time.sleep(600)  # a long roll-out


def main(case: str, folder: Path) -> None:
    what, rank, where = case.split()
    victim = int(rank)
    logging.basicConfig(format="[%(process)d] %(message)s")
    start_process_group(120)
    mesh = build_mesh(ParallelConfig(ranks=int(os.environ["WORLD_SIZE"])), seed=1)
    (folder / f"{mesh.rank}.pid").write_text(str(os.getpid()))
    stop = StopRequested(grace_s=120)
    stop.install()  # as trainer ranks do: torchrun's SIGTERM must not end them before they have spoken
    lockstep = Lockstep(mesh, verbs(mesh, what, victim), DEADLINE_S)
    if mesh.rank > 0:
        lockstep.serve()
    else:
        try:
            lead(lockstep, mesh, what, victim, where, folder)
        finally:
            lockstep.close()
    stop.uninstall()
    stop_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
