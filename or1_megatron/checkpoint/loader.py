"""Loads a checkpoint in Megatron's sharded format, at any layout.

A folder holds ``*.distcp`` and ``.metadata`` (parameters, master weights, moments; ``shard_files``), ``common.pt``
(how many SGD steps were made), ``loop.json`` (the loop's state), ``random.pt`` (each rank's random generators) and
``manifest.json`` (``manifest``). ``saver`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from or1_megatron.checkpoint.saver import COMMON, RANDOM
from or1_megatron.checkpoint.shard_files import StateMismatch, read_shards
from or1_megatron.checkpoint.sharded_state import local_shards, set_steps
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.runtime.run_folder import LOOP_STATE
from or1_megatron.runtime.seeds import restore_random_state


def load(policy: MegatronPolicy, folder: Path) -> Mapping[str, Any]:
    """Restore a checkpoint, which the caller has compared with its manifest, at this run's layout; collective.

    The random generators are restored if the number of ranks is the same; otherwise they keep their seeds. Returns the
    loop's state.

    Raises:
        StateMismatch: the checkpoint is of another model, or its adapters are of another base.
    """
    common = torch.load(folder / COMMON)
    base = common.get("base", {})
    if base.get("digest") != policy.base.get("digest"):
        held, ours = (f"adapters of {of['folder']}" if of else "all weights" for of in (base, policy.base))
        raise StateMismatch(f"{folder} holds {held}, and this run trains {ours}: expected the same base")
    read_shards(folder, local_shards(policy))
    set_steps(policy, int(common["sgd_steps"]))
    states = torch.load(folder / RANDOM, weights_only=False)
    if len(states) == policy.mesh.world:
        restore_random_state(states[policy.mesh.rank])
    return dict(json.loads((folder / LOOP_STATE).read_text()))
