"""One update of a whole batch that every rank has, for commands that run without the loop."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from or1_megatron.interfaces import Objective
from or1_megatron.parallel.policy import MegatronPolicy, gather_scores, unpack_scores
from or1_megatron.rl.objectives.scored import linearise, needs_scores
from or1_megatron.types import Batch, TokenScores, UpdateReport


def score_whole(policy: MegatronPolicy, batch: Batch, temperature: float) -> TokenScores | None:
    """Return the scores of the batch's samples on rank 0; None elsewhere. Collective."""
    gathered = gather_scores(policy.mesh, policy.score(batch.ranks[policy.mesh.data_rank], temperature))
    return None if gathered is None else unpack_scores(batch.ranks, gathered, batch.sample_count)


def update_whole(policy: MegatronPolicy, batch: Batch, objective: Objective, one_pass: bool) -> UpdateReport:
    """Update as the loop does, an objective that needs scores first included. Collective.

    Args:
        batch: the same on every rank.
        one_pass: the policy's head is one-pass.
    """
    told: UpdateReport
    if not needs_scores(objective, one_pass):
        told = policy.update(batch.ranks[policy.mesh.data_rank], objective, batch.token_count)
        return told
    found = [score_whole(policy, batch, objective.temperature)]
    if policy.mesh.world > 1:
        dist.broadcast_object_list(found, src=0, group=policy.mesh.control)
    assert found[0] is not None
    linear = linearise(batch, objective, found[0])
    told = policy.update(linear.batch.ranks[policy.mesh.data_rank], linear.objective, batch.token_count)
    return replace(told, sums=linear.sums)
