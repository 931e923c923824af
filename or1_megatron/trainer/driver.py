"""The policy as rank 0's loop sees it: each method is relayed in lockstep and executed by every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from or1_megatron.checkpoint.loader import load
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.checkpoint.sharded_state import restart_optimizer
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.lockstep import Lockstep, Verb
from or1_megatron.parallel.policy import MegatronPolicy, export_hf, unpack_scores
from or1_megatron.parallel.replicas import check_replicas
from or1_megatron.types import Batch, TokenScores, UpdateReport


def policy_verbs(
    policy: MegatronPolicy, saver: CheckpointSaver, score_reference: Verb | None = None
) -> dict[str, Verb]:
    """Return what every rank can do with its part of the policy, by verb.

    Args:
        saver: this rank's part of saving.
        score_reference: scores this rank's rows by the frozen reference, where there is one.
    """
    verbs: dict[str, Verb] = {
        "score": policy.score,
        "update": policy.update_and_score,
        "restart_optimizer": partial(restart_optimizer, policy),
        "check_replicas": partial(check_replicas, policy),
        "offload": policy.host.offload,
        "restore": policy.host.restore,
        "save": saver.save,
        "load": partial(load, policy),
        "export_hf": partial(export_hf, policy),
    }
    return verbs if score_reference is None else {**verbs, "score_reference": score_reference}


class PolicyDriver:
    """Rank 0's handle on the policy; a subclass with ``hand_off`` is an ``interfaces.Policy``."""

    def __init__(self, lockstep: Lockstep, saver: CheckpointSaver) -> None:
        self._lockstep, self._saver = lockstep, saver

    def take_devices(self) -> None:
        """Prepare the ranks to compute: a policy that shares its devices with engines takes them here."""

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        return self._scored("score", batch, temperature)

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        return self._scored("score_reference", batch, temperature)

    def _scored(self, verb: str, batch: Batch, temperature: float) -> TokenScores:
        self.take_devices()
        scored = self._lockstep.call(verb, temperature, per_replica=batch.ranks)
        return unpack_scores(batch.ranks, scored, batch.sample_count)

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        self.take_devices()
        report: UpdateReport
        report, scored = self._lockstep.call("update", objective, batch.token_count, per_replica=batch.ranks)
        return replace(report, scores=unpack_scores(batch.ranks, scored, batch.sample_count))

    def restart_optimizer(self) -> None:
        self._lockstep.call("restart_optimizer")

    def save(self, folder: Path, state: Mapping[str, Any], responses: bytes = b"") -> None:
        self._saver.responses = responses  # rank 0 writes them: they need not go to all ranks
        self._lockstep.call("save", folder, state)

    def finish_save(self, wait: bool) -> float | None:
        return self._saver.finish(wait)  # no verb: the savers talk among themselves

    def load(self, folder: Path) -> Mapping[str, Any]:
        self.take_devices()
        state: Mapping[str, Any] = self._lockstep.call("load", folder)
        return state

    def export_hf(self, folder: Path) -> None:
        self._lockstep.call("export_hf", folder)
