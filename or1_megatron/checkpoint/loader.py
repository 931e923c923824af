"""Loads a checkpoint in Megatron's sharded format, at any layout, after a check against its manifest.

A folder holds ``*.distcp`` and ``.metadata`` (parameters, master weights, moments; ``shard_files``), ``common.pt``
(step counts), ``loop.json`` (the loop's state), ``random.pt`` (each rank's random generators) and ``manifest.json``
(``manifest``). ``saver`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from or1_megatron.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable, check_manifest
from or1_megatron.checkpoint.saver import COMMON, RANDOM, CheckpointError, restore_random_state
from or1_megatron.checkpoint.shard_files import read_shards
from or1_megatron.checkpoint.sharded_state import local_shards, set_optimizer_step
from or1_megatron.parallel.lockstep import raise_together
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.runtime.run_folder import LOOP_STATE


def load(policy: MegatronPolicy, folder: Path, digests: bool = True) -> Mapping[str, Any]:
    """Restore a checkpoint at this run's layout and return the loop's state; collective.

    The random generators are restored if the number of ranks is the same; otherwise they keep their seeds.

    Args:
        digests: compare the files' digests first; not needed if the caller has just done it.

    Raises:
        CheckpointError: a file is missing, cut or altered (found before anything is loaded).
        StateMismatch: the checkpoint is of another model.
    """
    problem = None
    if policy.mesh.rank == 0:
        try:
            check_manifest(folder, digests)
        except (CheckpointDamaged, CheckpointUnreadable) as error:
            problem = CheckpointError(str(error))
    raise_together(policy.mesh, problem)
    common = torch.load(folder / COMMON)
    read_shards(folder, local_shards(policy))
    policy.sgd_steps = int(common["sgd_steps"])
    set_optimizer_step(policy, int(common["optimizer_step"]))
    states = torch.load(folder / RANDOM, weights_only=False)
    if len(states) == policy.mesh.world:
        restore_random_state(states[policy.mesh.rank])
    return dict(json.loads((folder / LOOP_STATE).read_text()))
