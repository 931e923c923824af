"""One rank under lockstep, as a trainer's rank is, in which a fault happens on purpose: lockstep_worker.py CASE FOLDER.

A case is "what rank where": what in {raise, sleep, kill, stop, none}, where in {verb, between, none}, as "kill 1
between".
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.errors import AgreedError
from or1_megatron.parallel import lockstep as module
from or1_megatron.parallel.lockstep import Lockstep, raise_together
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group
from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.heartbeat import Heartbeat, beats_folder
from or1_megatron.runtime.signals import StopRequested, is_launched

DEADLINE_S = 10.0


def fail(what: str) -> None:
    if what == "raise":
        raise KeyError("the tensor that was not there")
    if what == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    time.sleep(600)


def verbs(mesh: Mesh, what: str, victim: int) -> dict[str, Any]:
    def add(mine: Any, shared: int) -> float:
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


def work(lockstep: Lockstep, mesh: Mesh) -> None:
    """Run rank 0's part: an error that all ranks agree on, then a verb with a payload for each replica."""
    payloads = [np.arange(3) * (i + 1) for i in range(mesh.data)]
    try:
        lockstep.call("disagree")
    except AgreedError as error:
        print("agreed:", error, flush=True)
    print("sum", lockstep.call("add", 1, per_replica=payloads), flush=True)


def suffer(lockstep: Lockstep, what: str, victim: int, where: str, folder: Path) -> None:
    """Run rank 0's part: a verb during which the fault happens, or a pause between verbs during which it happens."""
    if where == "verb":
        lockstep.call("wait")
    elif where == "between" and victim == 0:
        fail(what)
    elif where == "between":
        os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        time.sleep(600)  # a long rollout


def main(case: str, folder: Path) -> None:
    what, rank, where = case.split()
    victim = int(rank)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    start_process_group(120)
    mesh = build_mesh(ParallelConfig(ranks=int(os.environ["WORLD_SIZE"])), seed=1)
    (folder / f"{mesh.rank}.pid").write_text(str(os.getpid()))
    handling = StopRequested(grace_s=120).handling_signals()
    handling.__enter__()  # as trainer ranks do: torchrun's SIGTERM must not end them before they say where they are
    heart = Heartbeat(beats_folder(str(folder)), f"rank {mesh.rank}")
    note = FaultRecord(folder).failed(f"rank {mesh.rank}")
    # A busy machine must not make healthy ranks late: only the faults that nothing else ends meet a short deadline.
    waits_for_deadline = not is_launched() and (what in ("sleep", "stop") or where == "between")
    module._GRACE_S = 5.0
    courses: list[tuple[float, Callable[[Lockstep], None]]] = [
        (600.0, lambda lockstep: work(lockstep, mesh)),
        (DEADLINE_S if waits_for_deadline else 600.0, lambda lockstep: suffer(lockstep, what, victim, where, folder)),
    ]
    for deadline_s, lead in courses:
        lockstep = Lockstep(mesh, verbs(mesh, what, victim), deadline_s, heart, note)
        if mesh.rank > 0:
            lockstep.serve()
            continue
        try:
            lead(lockstep)
        finally:
            lockstep.close()
    shutil.rmtree(beats_folder(str(folder)), ignore_errors=True)
    handling.__exit__(None, None, None)
    stop_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
