"""The policy as the loop sees it: relayed to all ranks, and in step with the engines that serve its weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.errors import UserError
from or1_megatron.handoff.probe import Probe, ProbeResult
from or1_megatron.handoff.sender import EngineWeightSender
from or1_megatron.interfaces import EnginesLost, Objective
from or1_megatron.parallel.collective_errors import AgreedError, raise_together
from or1_megatron.parallel.driver import PolicyDriver
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.saver import CheckpointSaver
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rollout.engine_group import EngineError, EngineGroup
from or1_megatron.types import Batch, Float32Array, HandoffReport, Sample, TokenScores, UpdateReport

log = logging.getLogger(__name__)

_PROBE_EVERY_STEPS_ON_GPU = 10


@dataclass(frozen=True)
class Turns:
    """What trainer and engines do for each other's sake."""

    engines_sleep: bool
    """They share their devices, and must not use them at once."""
    trainer_offloads: bool
    """Its state lies on the host while the engines sample."""


class SendError(AgreedError, EnginesLost):
    """The weights did not reach all engines. All trainer ranks know, and are ready to send them again."""


class RanksSender:
    """A trainer rank's end of the handoff, in step with the other ranks' ends when something goes wrong."""

    def __init__(self, sender: EngineWeightSender, mesh: Mesh, replaced: Callable[[], int] = lambda: 0) -> None:
        """``replaced``: on rank 0, how many engines have been replaced so far."""
        self._sender, self._mesh, self._replaced = sender, mesh, replaced
        self._met = 0

    def send(self, version: int) -> int:
        """Bring every engine to ``version``; returns the bytes that this rank sent. Collective.

        Raises:
            SendError: on every rank, when that failed on rank 0, which sees whatever fails.
        """
        replaced = [self._replaced()]
        if self._mesh.world > 1:
            dist.broadcast_object_list(replaced, src=0, group=self._mesh.control)
        if replaced[0] != self._met:
            self._sender.close()  # to meet the new ones
            self._met = replaced[0]
        sent, error = 0, None
        try:
            sent = self._sender.send(version)
        except RuntimeError as failure:
            if not isinstance(failure, UserError):
                raise  # of this rank, not of the engines
            log.info("sending version %d failed", version, exc_info=True)
            error = SendError(str(failure))
        try:
            raise_together(self._mesh, error)
        except SendError:
            if error is None:
                self._sender.close()  # this rank had no part in the failure, and has one in what follows from it
            raise
        if error is not None:  # of this rank alone
            raise error
        return sent


class SyncedPolicy:
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
        engines: EngineGroup,
        config: HandoffConfig,
        layout: BatchLayout,
        dtype: Literal["float32", "bfloat16"],
        longest: int,
        turns: Turns,
        restart_lost: Callable[[], list[int]],
        rejoin: Callable[[], None],
    ) -> None:
        """
        Args:
            layout: for the probe's batch.
            longest: tokens that an engine takes, prompt and response together.
            turns: engines that sleep in their turn are asleep now.
            restart_lost: replaces engines that are gone (``EnginePool.restart_lost``).
            rejoin: called when replaced engines serve again.
        """
        self._driver = PolicyDriver(lockstep, saver)
        self._sender, self._engines, self._config = sender, engines, config
        self._turns = turns
        self._asleep = turns.engines_sleep
        self._away = False
        self._restarts = False
        self._restart_lost, self._rejoin = restart_lost, rejoin
        self._version = 0
        self._handoffs = 0
        self._probe = Probe(config, dtype, policy.hf["vocab_size"], longest)
        self._probe_batch = pack([_scored_whole(ids) for ids in self._probe.token_ids], layout)

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

        Engines serve the new weights only when all of this has gone well. One that dies meanwhile is replaced, and
        everything is done again; requests in flight wait.

        Raises:
            SendError: an engine failed, did not keep up, or received or holds something else than was sent.
            HandoffMismatch: an engine does not compute what the policy computes.
            EngineError: an engine died too often.
        """
        started_s = time.perf_counter()
        self._trainers_turn()
        every = self._config.probe_every_steps
        if every is None:
            every = _PROBE_EVERY_STEPS_ON_GPU if torch.cuda.is_available() else 1
        due = every and self._handoffs % every == 0
        expected = self._driver.score(self._probe_batch, 1.0).log_probs if due else None
        scored_s = time.perf_counter()
        if self._turns.trainer_offloads:
            self._driver.offload("optimizer", "gradients")
        restarted = False
        while True:
            try:
                bytes_sent, sent_s, difference = self._deliver(version, expected)
                break
            except (SendError, EngineError) as error:
                if not self._replaced_lost(error):
                    raise
                restarted = True
        if restarted:
            self._rejoin()
        self._version = version
        self._handoffs += 1
        return HandoffReport(
            version=version,
            bytes_sent=bytes_sent,
            transfer_s=sent_s - scored_s,
            probe_s=time.perf_counter() - sent_s + scored_s - started_s,
            probe_max_abs_diff=None if difference is None else difference.largest,
            probe_mean_abs_diff=None if difference is None else difference.mean,
        )

    def revive(self) -> None:
        """Amid a roll-out: replace the engines that are gone, and bring all of them to the weights of the hour.

        Raises:
            EngineError: an engine died too often. What ``hand_off`` raises.
        """
        self._restart_lost()
        self.hand_off(self._version)
        self._rejoin()

    def _deliver(self, version: int, expected: Sequence[Float32Array] | None) -> tuple[int, float, ProbeResult | None]:
        """(bytes sent, when they had been, what the probe says if it is due)."""
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
            difference = self._probe.judge(self._sender.probe(self._probe.token_ids), expected)
        self._engines.certify(version)
        return bytes_sent, sent_s, difference

    def _replaced_lost(self, error: Exception) -> bool:
        """Whether a handoff failed because of engines that are gone, and have been replaced.

        Not where engines take turns with the trainer: one that starts needs memory that is the trainer's now.
        """
        if self._turns.engines_sleep or not self._restart_lost():
            return False
        log.warning("the handoff is done again: %s", error)
        if self._away:
            self._driver.restore("parameters")
        return True

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
        advantage=0.0,
        loss_mask=np.ones(rest.size, dtype=np.bool_),
    )
