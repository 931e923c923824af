"""The policy as rank 0's loop sees it: each method is relayed in lockstep and executed by every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from or1_megatron.interfaces import Objective
from or1_megatron.parallel import checkpoint
from or1_megatron.parallel.lockstep import Lockstep, Verb
from or1_megatron.parallel.offload import Thing
from or1_megatron.parallel.policy import MegatronPolicy, export_hf, gather_scores, unpack_scores
from or1_megatron.parallel.reference import FrozenReference
from or1_megatron.parallel.saver import CheckpointSaver
from or1_megatron.parallel.sharded_state import restart_optimizer
from or1_megatron.types import Batch, MicroBatch, TokenScores, UpdateReport


def policy_verbs(
    policy: MegatronPolicy,
    send: Callable[[int], int],
    saver: CheckpointSaver,
    reference: FrozenReference | None = None,
) -> dict[str, Verb]:
    """What every rank can do with its part of the policy, by verb.

    Args:
        send: this rank's end of a weight handoff: version in, bytes sent out.
        saver: this rank's end of saving.
        reference: this rank's part of the frozen reference, where there is one.
    """

    def score(temperature: float, rows: Sequence[MicroBatch]) -> list[Any] | None:
        return gather_scores(policy.mesh, policy.score(rows, temperature))

    def score_reference(temperature: float, rows: Sequence[MicroBatch]) -> list[Any] | None:
        if reference is None:
            raise RuntimeError("score_reference: this run has no reference; algorithm.kl.reference names its folder")
        return gather_scores(policy.mesh, reference.score(rows, temperature))

    def hand_over(version: int, _: Any) -> int:
        policy.sync_parameters()
        return send(version)

    def update(shared: tuple[Objective, int], rows: Sequence[MicroBatch]) -> tuple[UpdateReport, list[Any] | None]:
        objective, token_count = shared
        report, scored = policy.update_and_score(rows, objective, token_count)
        return report, gather_scores(policy.mesh, scored)

    return {
        "score": score,
        "score_reference": score_reference,
        "update": update,
        "send": hand_over,
        "save": lambda shared, _: saver.save(shared[0], shared[1]),
        "load": lambda folder, _: checkpoint.load(policy, folder, digests=False),  # whoever chose it has compared them
        "offload": lambda things, _: policy.host.offload(*things),
        "restore": lambda things, _: policy.host.restore(*things),
        "restart_optimizer": lambda _, __: restart_optimizer(policy),
        "export_hf": lambda folder, _: export_hf(policy, folder),
    }


class PolicyDriver:
    """Rank 0's handle on the policy; with ``hand_off`` added by the composition root it is an ``interfaces.Policy``."""

    def __init__(self, lockstep: Lockstep, saver: CheckpointSaver) -> None:
        self._lockstep, self._saver = lockstep, saver

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        scored = self._lockstep.call("score", temperature, batch.ranks)
        return unpack_scores(batch.ranks, scored, batch.sample_count)

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        scored = self._lockstep.call("score_reference", temperature, batch.ranks)
        return unpack_scores(batch.ranks, scored, batch.sample_count)

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        report: UpdateReport
        report, scored = self._lockstep.call("update", (objective, batch.token_count), batch.ranks)
        return replace(report, scores=unpack_scores(batch.ranks, scored, batch.sample_count))

    def restart_optimizer(self) -> None:
        self._lockstep.call("restart_optimizer", None)

    def send(self, version: int) -> int:
        """Bring every engine to ``version``; returns the bytes that rank 0 sent."""
        return int(self._lockstep.call("send", version))

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._lockstep.call("save", (folder, state))

    def finish_save(self, wait: bool) -> float | None:
        return self._saver.finish(wait)  # the ranks' savers see to it among themselves

    def load(self, folder: Path) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._lockstep.call("load", folder)
        return state

    def offload(self, *things: Thing) -> None:
        """Move these to the host, on every rank; ``restore`` moves them back."""
        self._lockstep.call("offload", things)

    def restore(self, *things: Thing) -> None:
        self._lockstep.call("restore", things)

    def export_hf(self, folder: Path) -> None:
        self._lockstep.call("export_hf", folder)
