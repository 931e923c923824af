"""The policy as rank 0's loop sees it: each method is relayed in lockstep and executed by every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from or1_megatron.interfaces import Objective
from or1_megatron.parallel import checkpoint
from or1_megatron.parallel.lockstep import Lockstep, Verb
from or1_megatron.parallel.policy import MegatronPolicy, export_hf, unpack_scores
from or1_megatron.types import Batch, MicroBatch, TokenScores, UpdateReport


def policy_verbs(policy: MegatronPolicy, send: Callable[[int], int]) -> dict[str, Verb]:
    """What every rank can do with its part of the policy, by verb.

    Args:
        send: this rank's end of a weight handoff: version in, bytes sent out.
    """

    def score(temperature: float, rows: Sequence[MicroBatch]) -> list[Any] | None:
        local = policy.score(rows, temperature)
        mesh = policy.mesh
        if mesh.world == 1:
            return [(mesh.data_rank, local)]
        gathered: list[Any] | None = [None] * mesh.world if mesh.rank == 0 else None
        dist.gather_object((mesh.data_rank, local), gathered, dst=0, group=mesh.control)
        return gathered

    def update(shared: tuple[Objective, int], rows: Sequence[MicroBatch]) -> UpdateReport:
        objective, token_count = shared
        return policy.update(rows, objective, token_count)

    return {
        "score": score,
        "update": update,
        "send": lambda version, _: send(version),
        "save": lambda shared, _: checkpoint.save(policy, shared[0], shared[1]),
        "load": lambda folder, _: checkpoint.load(policy, folder),
        "export_hf": lambda folder, _: export_hf(policy, folder),
    }


class PolicyDriver:
    """Rank 0's handle on the policy; with ``hand_off`` added by the composition root it is an ``interfaces.Policy``."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        gathered = self._lockstep.call("score", temperature, batch.ranks)
        by_replica = {replica: scored for replica, scored in gathered if scored is not None}
        ordered = [by_replica[replica] for replica in range(len(batch.ranks))]
        return unpack_scores(batch.ranks, ordered, batch.sample_count)

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        report: UpdateReport = self._lockstep.call("update", (objective, batch.token_count), batch.ranks)
        return report

    def send(self, version: int) -> int:
        """Bring every engine to ``version``; returns the bytes that rank 0 sent."""
        return int(self._lockstep.call("send", version))

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._lockstep.call("save", (folder, state))

    def load(self, folder: Path) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._lockstep.call("load", folder)
        return state

    def export_hf(self, folder: Path) -> None:
        self._lockstep.call("export_hf", folder)
