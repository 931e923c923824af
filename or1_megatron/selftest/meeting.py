"""This node's number among several, and where they meet: torchrun, Slurm or examples/launch.sh's environment say it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from or1_verify.errors import UserError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_", "MASTER_")


def extra_process(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or Slurm started more than one process on this node, and this is not its first."""
    return environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")) != "0"


def meet(nodes: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what ``torch.distributed`` needs to meet, with one process per node: RANK is the node's number.

    Raises:
        UserError: the environment does not say it, or says something else.
    """
    kept = {name: value for name, value in environment.items() if name.startswith("TORCHELASTIC_")}
    if "GROUP_RANK" in environment:  # torchrun
        node, count = environment["GROUP_RANK"], environment["GROUP_WORLD_SIZE"]
        address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    elif "SLURM_NODEID" in environment:
        node, count = environment["SLURM_NODEID"], environment["SLURM_NNODES"]
        address = environment.get("MASTER_ADDR") or _first_host(environment["SLURM_JOB_NODELIST"])
        port = environment.get("MASTER_PORT") or str(20000 + int(environment["SLURM_JOB_ID"]) % 10000)
    elif "NODE_RANK" in environment and "MASTER_ADDR" in environment:
        node, count = environment["NODE_RANK"], environment.get("NNODES", str(nodes))
        address, port = environment["MASTER_ADDR"], environment.get("MASTER_PORT", "29500")
    else:
        raise UserError(
            f"--nodes {nodes}: start it on every node, under torchrun (--nnodes {nodes} --nproc-per-node 1) or srun "
            f"(--nodes {nodes} --ntasks-per-node 1), or set NODE_RANK, MASTER_ADDR and MASTER_PORT"
        )
    if int(count) != nodes:
        raise UserError(f"--nodes {nodes}, but it was started on {count} nodes")
    return {**kept, "RANK": node, "WORLD_SIZE": count, "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": port}


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without torchrun's variables for this process: the checks start worlds of their own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
    }


def _first_host(nodes: str) -> str:
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise UserError(f"'{' '.join(command)}' does not name node 0 ({error}): set MASTER_ADDR") from None
