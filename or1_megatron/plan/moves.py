"""The time of what moves bytes: state to and from the host, weights to engines, checkpoints, the start of a run."""

from __future__ import annotations

import math

from or1_megatron.config.hardware import Rates
from or1_megatron.config.schema import Config
from or1_megatron.sizing.memory import offloaded_bytes
from or1_megatron.sizing.storage import checkpoint_bytes
from or1_megatron.weights.shape import BYTES, Shape


def state_move_s(config: Config, shape: Shape, rates: Rates) -> float:
    """Return the seconds to move a rank's weights and optimizer state between device and host, once."""
    return offloaded_bytes(config, shape) / rates.host_bytes_per_s


def hand_off_s(config: Config, shape: Shape, rates: Rates) -> float:
    """Return the seconds of a handoff: the busiest rank's bytes through its link, and the loading.

    Each engine rank receives its shard. Trainer ranks send as much as all engine ranks receive, spread evenly. They
    stay in a node where every node holds the whole model, colocated. Packing and loading read and write a shard twice.
    """
    parallel, rollout = config.parallel, config.rollout
    shard = shape.parameters * BYTES[config.model.dtype] / rollout.tensor_parallel
    sent = shard * rollout.engines * rollout.tensor_parallel / parallel.ranks
    within = rollout.placement == "colocated" and parallel.tensor * parallel.pipeline <= rates.node_devices
    rate = rates.link_bytes_per_s if within else rates.network_bytes_per_s
    return max(shard, sent) / (rate * rates.link_share) + 4 * shard / (rates.memory_bytes_per_s * rates.memory_share)


def save_s(config: Config, shape: Shape, rates: Rates) -> tuple[float, float]:
    """Return the seconds that a save holds up the loop for its copy, and those of the writing, beside it or not."""
    written = checkpoint_bytes(config, shape)
    copied_s = written / config.parallel.ranks / rates.host_bytes_per_s
    return copied_s, written / storage_bytes_per_s(config, rates)


def storage_bytes_per_s(config: Config, rates: Rates) -> float:
    """Return what all nodes of the run together move to or from shared storage."""
    return min(rates.storage_total_bytes_per_s, nodes_of(config, rates) * rates.storage_bytes_per_s)


def start_s(config: Config, shape: Shape, rates: Rates) -> float:
    """Return the seconds from the command to the first step: a fixed part, each node's reading of the whole model (what
    its ranks and engines read again comes from its page cache), and the first handoff."""
    read = shape.parameters * BYTES[config.model.dtype] * nodes_of(config, rates)
    return rates.start_s + read / storage_bytes_per_s(config, rates) + hand_off_s(config, shape, rates)


def nodes_of(config: Config, rates: Rates) -> int:
    return math.ceil(config.devices / rates.node_devices)
