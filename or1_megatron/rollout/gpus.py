"""Lists the GPUs of each node of the Ray cluster, by UUID.

A GPU's number can differ between processes: it depends on CUDA_VISIBLE_DEVICES and on how CUDA sorts. A GPU's UUID is
the same in every process, and CUDA_VISIBLE_DEVICES accepts UUIDs. So the UUID of a trainer rank's GPU tells the rank's
node, whatever the hosts are called.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from or1_megatron.rollout.cluster import ClusterError
from or1_megatron.rollout.ray_errors import failure_of

KEEP_DEVICES: Final = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment that stops Ray from emptying CUDA_VISIBLE_DEVICES of a task or actor with num_gpus=0."""

_TIMEOUT_S = 300.0  # every node starts a process that imports torch


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node of the cluster, and the UUIDs of the GPUs that processes on the node see, in the order of GPU numbers."""

    node_id: str
    host: str
    gpus: tuple[str, ...]


def gpu_uuid(number: int) -> str:
    """Return the UUID of GPU ``number`` of this process, in the form that CUDA_VISIBLE_DEVICES accepts."""
    import torch  # here, for the engines' processes load this module before their engine is built

    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


def node_gpus(timeout_s: float = _TIMEOUT_S) -> list[NodeGpus]:
    """Return the live nodes with the GPUs that a process on the node sees, sorted by host name.

    The process sees the GPUs that ``ray start`` saw: all GPUs of the node, or those of its CUDA_VISIBLE_DEVICES.

    Raises:
        ClusterError: a node did not answer in time, or its process failed.
    """
    nodes = sorted(
        (node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"]
    )
    calls = [
        _gpus_here.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()
        for _, _, node_id in nodes
    ]
    deadline = time.monotonic() + timeout_s
    listed = []
    for (host, _, node_id), call in zip(nodes, calls, strict=True):
        try:
            gpus = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            raise ClusterError(f"node {host} did not list its GPUs within {timeout_s:g} s") from error
        except RayError as error:
            raise ClusterError(f"node {host} could not list its GPUs: {failure_of(error)}") from error
        listed.append(NodeGpus(node_id, host, tuple(gpus)))
    return listed


@ray.remote(num_cpus=0, max_calls=1, runtime_env={"env_vars": KEEP_DEVICES})
def _gpus_here() -> list[str]:
    import torch

    return [gpu_uuid(number) for number in range(torch.cuda.device_count())]
