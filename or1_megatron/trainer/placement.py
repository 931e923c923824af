"""Starts the engines on the trainer's GPUs (colocated: they take turns) or on other GPUs of the cluster (separate)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from or1_megatron.config.schema import Config, RolloutConfig
from or1_megatron.rollout.cluster import wait_for_nodes
from or1_megatron.rollout.engine_pool import EnginePlace, EnginePool
from or1_megatron.rollout.gpus import NodeGpus, gpu_uuid, node_gpus
from or1_megatron.runtime.faults import Fault, FaultRecord
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.sizing.kv_cache import shared_kv_cache_bytes, with_gpu_memory
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape
from or1_verify.errors import UserError


class PlacementError(UserError, ValueError):
    """Engines and trainer ranks do not fit on the devices as configured."""


@dataclass(frozen=True, slots=True)
class RankGpu:
    """The GPU of a trainer rank. ``host`` is for messages only: two machines may have the same host name."""

    host: str
    uuid: str


def start_engines(config: Config, folder: RunFolder, stack: ExitStack) -> EnginePool:
    """Begin to start the engines on the connected Ray cluster; return before they are up. ``stack`` closes the pool."""
    wait_for_nodes(config.cluster.nodes, config.cluster.join_timeout_s)
    faults = FaultRecord(folder.root)
    engines = EnginePool(
        sized_rollout(config),
        config.model.hf,
        config.model.dtype,
        config.longest_sequence,
        folder.run_id,
        not torch.cuda.is_available(),
        engine_places(config),
        lambda index, reason: faults.write(Fault("engine", f"engine {index}", reason)),
        config.track.prometheus_port and config.track.prometheus_port + 1,
    )
    stack.callback(engines.close)
    return engines


def sized_rollout(config: Config) -> RolloutConfig:
    """Return the section ``rollout``, with a KV-cache size if engines must leave room on their GPUs for the trainer."""
    if config.rollout.kv_cache_bytes is not None or not takes_turns(config):
        return config.rollout
    size = shared_kv_cache_bytes(with_gpu_memory(config), Shape.of(read_hf_config(config.model.hf)))
    return config.rollout if size is None else config.rollout.model_copy(update={"kv_cache_bytes": size})


def takes_turns(config: Config) -> bool:
    """Return whether engines and trainer share GPUs and must take turns. On CPU, return False."""
    return config.rollout.placement == "colocated" and torch.cuda.is_available()


def offloads(config: Config) -> bool:
    """Return whether the trainer's state is moved to host memory while the engines sample."""
    return config.parallel.offload == "always" or (config.parallel.offload == "auto" and takes_turns(config))


def engine_places(config: Config) -> list[EnginePlace] | None:
    """On rank 0, return each engine's node and GPUs. Return None on other ranks, and on CPU, where Ray chooses.

    On GPUs this is a collective call of the trainer's ranks, and rank 0 must be connected to Ray.

    Raises:
        NodesDiffer: the nodes differ. All ranks raise this error.
        PlacementError: there are too few GPUs, or an engine would span nodes.
        ClusterError: a node did not list its GPUs.
    """
    if not torch.cuda.is_available():
        return None
    from or1_megatron.trainer.nodes_alike import join_world

    join_world(config)
    mine = RankGpu(socket.gethostname(), gpu_uuid(int(os.environ.get("LOCAL_RANK", "0"))))
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() > 0:
        return None
    place = colocated_places if config.rollout.placement == "colocated" else separate_places
    return place(config.rollout, ranks, node_gpus())


def colocated_places(rollout: RolloutConfig, ranks: Sequence[RankGpu], nodes: Sequence[NodeGpus]) -> list[EnginePlace]:
    """Return each engine's node and GPUs. An engine has the GPUs of ``tensor_parallel`` consecutive trainer ranks."""
    size, engines = rollout.tensor_parallel, rollout.engines
    node_of = {uuid: node.node_id for node in nodes for uuid in node.gpus}
    for number, rank in enumerate(ranks[: size * engines]):
        if rank.uuid not in node_of:
            raise PlacementError(
                f"trainer rank {number} on host {rank.host} has {rank.uuid}, which no node of the Ray cluster shows "
                f"({_listed(nodes, ranks)}): run 'ray start --address=...' there, with all of the trainer's GPUs in "
                "CUDA_VISIBLE_DEVICES if that is set"
            )
    places = []
    for engine in range(engines):
        part = ranks[engine * size : (engine + 1) * size]
        node_ids = {node_of[rank.uuid] for rank in part}
        if len(node_ids) > 1:
            raise PlacementError(
                f"rollout: engine {engine} (tensor_parallel {size}) would span the nodes "
                f"{', '.join(dict.fromkeys(rank.host for rank in part))}; let tensor_parallel divide the GPUs of a node"
            )
        places.append(EnginePlace(node_ids.pop(), tuple(rank.uuid for rank in part)))
    return places


def separate_places(rollout: RolloutConfig, ranks: Sequence[RankGpu], nodes: Sequence[NodeGpus]) -> list[EnginePlace]:
    """Return each engine's node and GPUs, chosen node by node from the GPUs that no trainer rank has."""
    size, engines = rollout.tensor_parallel, rollout.engines
    taken = {rank.uuid for rank in ranks}
    places: list[EnginePlace] = []
    for node in nodes:
        free = [uuid for uuid in node.gpus if uuid not in taken]
        taken |= set(free)  # two Ray nodes on one machine show the same GPUs
        places += [
            EnginePlace(node.node_id, tuple(free[first : first + size]))
            for first in range(0, len(free) - size + 1, size)
        ]
    if len(places) < engines:
        raise PlacementError(
            f"rollout: {engines} engines of tensor_parallel {size} need {size * engines} GPUs beside the trainer's "
            f"{len(ranks)} with placement 'separate', and there is room for {len(places)} of them "
            f"({_listed(nodes, ranks)}); lower rollout.engines, tensor_parallel or parallel.ranks, or add nodes"
        )
    return places[:engines]


def _listed(nodes: Sequence[NodeGpus], ranks: Sequence[RankGpu]) -> str:
    trained = {rank.uuid for rank in ranks}
    return "; ".join(
        f"{node.host} shows {len(node.gpus)} GPUs, {len(trained.intersection(node.gpus))} of them the trainer's"
        for node in nodes
    )
