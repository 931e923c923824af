"""Loads a checkpoint in Megatron's sharded format, at any parallel layout.

A checkpoint folder, which ``saver`` writes, holds ``*.distcp`` and ``.metadata`` (parameters, master weights, moments;
``shard_files``), ``common.pt`` (the number of SGD steps), ``loop.json`` (the loop's state), ``random.pt`` (each rank's
random generators) and ``manifest.json`` (``manifest``).
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
    """Load a checkpoint into the policy, at this run's parallel layout, and return the loop's state. A collective call.

    The caller must have compared the checkpoint with its manifest. The random generators are restored if the number of
    ranks has not changed; otherwise they keep their seeds.

    Raises:
        StateMismatch: the checkpoint is of another model, or its adapters are for another base model.
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
