"""Loading a checkpoint: Megatron's sharded format, read at any layout, checked against its manifest first.

A folder holds ``*.distcp`` and ``.metadata`` (parameters, masters, moments; ``shard_files``), ``common.pt`` (step
counts), ``loop.json`` (the loop's state), ``random.pt`` (each rank's generators) and ``manifest.json``
(``runtime.manifest``). ``saver`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from or1_megatron.parallel.collective_errors import raise_together
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.saver import COMMON, LOOP, RANDOM, CheckpointError, restore_random_state
from or1_megatron.parallel.shard_files import read_shards
from or1_megatron.parallel.sharded_state import local_shards, set_optimizer_step
from or1_megatron.runtime.manifest import CheckpointDamaged, CheckpointUnreadable, check_manifest


def load(policy: MegatronPolicy, folder: Path, digests: bool = True) -> Mapping[str, Any]:
    """Restore what was saved, at this run's layout, and return the loop's state; collective.

    The generators are restored where the number of ranks is the same; otherwise they keep their seeds.

    Args:
        digests: compare the files' digests first; not needed where that has just been done.

    Raises:
        CheckpointError: something is missing, cut or altered (found before anything is loaded).
        StateMismatch: the checkpoint is of another model.
    """
    problem = None
    if policy.mesh.rank == 0:
        try:
            check_manifest(folder, digests)
        except (CheckpointDamaged, CheckpointUnreadable) as error:
            problem = CheckpointError(str(error))
    raise_together(policy.mesh, problem)
    policy.sync_parameters()  # or a gather still under way would undo what is loaded
    common = torch.load(folder / COMMON)
    read_shards(folder, local_shards(policy))
    policy.sgd_steps = int(common["sgd_steps"])
    set_optimizer_step(policy, int(common["optimizer_step"]))
    states = torch.load(folder / RANDOM, weights_only=False)
    if len(states) == policy.mesh.world:
        restore_random_state(states[policy.mesh.rank])
    return dict(json.loads((folder / LOOP).read_text()))
