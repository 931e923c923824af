"""The policy as the loop sees it: relayed to all ranks, and in step with the engines that serve its weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from or1_megatron.config import HandoffConfig
from or1_megatron.handoff.certificate import compare_probe, probe_tokens
from or1_megatron.handoff.sender import EngineWeightSender
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.driver import PolicyDriver
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.saver import CheckpointSaver
from or1_megatron.rl.batch import BatchLayout, pack
from or1_megatron.rollout.pool import RayEngineControl
from or1_megatron.types import Batch, HandoffReport, Sample, TokenScores, UpdateReport

_PROBE_SEQUENCES = 2


@dataclass(frozen=True)
class Turns:
    """What trainer and engines do for each other's sake."""

    engines_sleep: bool
    """They share their devices, and must not use them at once."""
    trainer_offloads: bool
    """Its state lies on the host while the engines sample."""


class ServedPolicy:
    """``interfaces.Policy``: the driver's verbs, the handoff with its probe, and turns on shared GPUs.

    A colocated turn (GPU): engines sleep; the trainer takes its state back from the host and updates; optimizer state
    and gradients go to the host; engines wake their weights for the handoff; the parameters go to the host; engines
    wake their KV cache. On CPU, and with placement ``separate``, nobody sleeps, and unless asked nothing is moved.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        policy: MegatronPolicy,
        saver: CheckpointSaver,
        sender: EngineWeightSender,
        engines: RayEngineControl,
        config: HandoffConfig,
        layout: BatchLayout,
        turns: Turns,
    ) -> None:
        """
        Args:
            layout: for the probe's batch.
            turns: engines that sleep in their turn are asleep now.
        """
        self._driver = PolicyDriver(lockstep, saver)
        self._sender, self._engines, self._config = sender, engines, config
        self._turns = turns
        self._asleep = turns.engines_sleep
        self._away = False
        self._restarts = False
        self._handoffs = 0
        self._probe = probe_tokens(policy.hf["vocab_size"], max(2, config.probe_tokens // _PROBE_SEQUENCES))
        self._probe_batch = pack([_scored_whole(ids) for ids in self._probe], layout)

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        self._trainers_turn()
        return self._driver.score(batch, temperature)

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        self._trainers_turn()
        return self._driver.score_reference(batch, temperature)

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        self._trainers_turn()
        return self._driver.update(batch, objective)

    def restart_optimizer(self) -> None:
        """At the trainer's next turn: now the engines may have the devices, and are about to sample."""
        self._restarts = True

    def hand_off(self, version: int) -> HandoffReport:
        """Send the weights as ``version``; then, at every n-th handoff, compare engines and policy on the probe.

        Raises:
            HandoffError: an engine failed or did not keep up.
            HandoffMismatch: an engine does not compute what the policy computes.
        """
        started_s = time.perf_counter()
        self._trainers_turn()
        every = self._config.probe_every_steps
        due = every and self._handoffs % every == 0
        expected = self._driver.score(self._probe_batch, 1.0).log_probs if due else None
        scored_s = time.perf_counter()
        if self._turns.trainer_offloads:
            self._driver.offload("optimizer", "gradients")
        if self._asleep:
            self._engines.wake_up(["weights"])
        bytes_sent = self._driver.send(version)
        if self._turns.trainer_offloads:
            self._driver.offload("parameters")
            self._away = True
        if self._asleep:
            self._engines.wake_up(["kv_cache"])
            self._asleep = False
        sent_s = time.perf_counter()
        difference = None
        if expected is not None:
            difference = compare_probe(self._sender.probe(self._probe), expected, self._config.probe_bound)
        self._handoffs += 1
        return HandoffReport(
            version=version,
            bytes_sent=bytes_sent,
            transfer_s=sent_s - scored_s,
            probe_s=time.perf_counter() - sent_s + scored_s - started_s,
            probe_max_abs_diff=difference,
        )

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._driver.save(folder, state)

    def finish_save(self, wait: bool) -> float | None:
        return self._driver.finish_save(wait)

    def load(self, folder: Path) -> Mapping[str, Any]:
        self._trainers_turn()
        return self._driver.load(folder)

    def export_hf(self, folder: Path) -> None:
        self._driver.export_hf(folder)

    def _trainers_turn(self) -> None:
        if self._turns.engines_sleep and not self._asleep:
            self._engines.sleep()
            self._asleep = True
        self._restore()
        if self._restarts:
            self._driver.restart_optimizer()
            self._restarts = False

    def _restore(self) -> None:
        if self._away:
            self._driver.restore("parameters", "gradients", "optimizer")
            self._away = False


def _scored_whole(token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> Sample:
    """A sequence of which every token but the first is scored."""
    rest = token_ids[1:]
    return Sample(
        prompt_ids=token_ids[:1],
        response_ids=rest,
        old_log_probs=np.zeros(rest.size, dtype=np.float32),
        advantage=0.0,
        loss_mask=np.ones(rest.size, dtype=np.bool_),
    )
