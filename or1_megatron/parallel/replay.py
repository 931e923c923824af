"""One rank of `or1 replay`: reads the dump, packs its samples for this layout, and repeats the update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy, WholePolicy
from or1_megatron.rl.batch import pack
from or1_megatron.rl.dump import read_dump, result_record
from or1_megatron.rl.objectives.scored import update
from or1_megatron.sizing.parallel_layouts import batch_layout
from or1_megatron.types import Float32Array
from or1_megatron.weights.families import read_hf_config

_RANK_WAIT_S = 1800.0


def largest_difference(a: tuple[Float32Array, ...], b: tuple[Float32Array, ...]) -> float:
    """Return the largest difference over all values that are finite on both sides; 0 if there are none."""
    left, right = (np.concatenate([*values, np.empty(0, dtype=np.float32)]).astype(np.float64) for values in (a, b))
    both = np.isfinite(left) & np.isfinite(right)
    return float(np.abs(left - right)[both].max(initial=0.0))


def replay(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Repeat the update of ``dump``, a folder, on the HF folder ``weights`` at ``parallel``; rank 0 notes it."""
    warnings.simplefilter("ignore")  # Megatron's warnings would bury the table
    dump, parallel = read_dump(Path(task["dump"])), ParallelConfig.model_validate(task["parallel"])
    model = ModelConfig(hf=Path(task["weights"]), dtype=dump.context["model"]["dtype"])
    torch.set_num_threads(parallel.threads_per_rank or 1)
    start_process_group(_RANK_WAIT_S)
    mesh = build_mesh(parallel, seed=1)
    policy = WholePolicy(MegatronPolicy(model, parallel, OptimizerConfig(), mesh))
    batch = pack(dump.samples, batch_layout(parallel, read_hf_config(model.hf)))
    scores = policy.score(batch, dump.objective.temperature)
    report = update(policy, batch, dump.objective, parallel.head == "one_pass")
    if mesh.rank == 0:
        apart = largest_difference(scores.log_probs, dump.log_probs) if dump.log_probs else 0.0
        note(result_record(report, scores.log_probs) | {"log_prob_difference": apart})
    stop_process_group()
