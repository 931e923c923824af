"""Starts the run's engines, and tells whether they share GPUs with the trainer (sleep, offload, KV-cache size)."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from or1_megatron.config.schema import Config, RolloutConfig
from or1_megatron.rollout.cluster import wait_for_nodes
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.runtime.faults import Fault, FaultRecord
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.sizing.kv_cache import shared_kv_cache_bytes, with_gpu_memory
from or1_megatron.trainer.placement import engine_places
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape


def start_engines(config: Config, folder: RunFolder, stack: ExitStack) -> EnginePool:
    """Begin to start the engines on the connected Ray cluster, and return before they are up. ``stack`` ends them."""
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
    """Return the section ``rollout``, with a KV-cache size where the engines must leave room for the trainer."""
    if config.rollout.kv_cache_bytes is not None or not takes_turns(config):
        return config.rollout
    size = shared_kv_cache_bytes(with_gpu_memory(config), Shape.of(read_hf_config(config.model.hf)))
    return config.rollout if size is None else config.rollout.model_copy(update={"kv_cache_bytes": size})


def takes_turns(config: Config) -> bool:
    """Return whether engines and trainer share GPUs and must take turns. On CPU engines never sleep."""
    return config.rollout.placement == "colocated" and torch.cuda.is_available()


def offloads(config: Config) -> bool:
    """Return whether the trainer's state is on the host while the engines sample."""
    return config.parallel.offload == "always" or (config.parallel.offload == "auto" and takes_turns(config))
