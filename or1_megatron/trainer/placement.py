"""Place engines on the trainer's GPUs when they share them."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from or1_megatron.config.schema import Config
from or1_megatron.errors import UserError
from or1_megatron.rollout.cluster import node_of
from or1_megatron.rollout.pool import EnginePlace


class PlacementError(UserError, ValueError):
    """Engines and trainer ranks do not fit on the devices as configured."""


def engine_places(config: Config) -> list[EnginePlace] | None:
    """Return one place per engine, on the GPUs of consecutive trainer ranks; None where Ray chooses (CPU, or separate).

    Collective over the trainer's ranks on GPUs.

    Raises:
        PlacementError: the engines need more GPUs than there are ranks, or an engine would span nodes.
        ClusterError: a trainer's node is not part of the Ray cluster.
    """
    if config.rollout.placement == "separate" or not torch.cuda.is_available():
        return None
    from or1_megatron.parallel.mesh import start_process_group

    start_process_group(config.cluster.verb_timeout_s)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    mine = (socket.gethostbyname(socket.gethostname()), str(torch.cuda.get_device_properties(index).uuid))
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return None if dist.get_rank() > 0 else _consecutive(config, everyone)


def _consecutive(config: Config, ranks: list[tuple[str, str]]) -> list[EnginePlace]:
    size, engines = config.rollout.tensor_parallel, config.rollout.engines
    if size * engines > len(ranks):
        raise PlacementError(
            f"rollout: {engines} engines of tensor_parallel {size} need {size * engines} GPUs; placement 'colocated' "
            f"has the trainer's {len(ranks)}"
        )
    places = []
    for engine in range(engines):
        part = ranks[engine * size : (engine + 1) * size]
        hosts = {host for host, _ in part}
        if len(hosts) > 1:
            raise PlacementError(
                f"rollout: engine {engine} (tensor_parallel {size}) would span the nodes {sorted(hosts)}; let "
                "tensor_parallel divide the GPUs of a node"
            )
        places.append(EnginePlace(node_of(hosts.pop()), tuple(f"GPU-{uuid}" for _, uuid in part)))
    return places
