"""``interfaces.Policy`` over all ranks: relays the loop's calls, hands off weights, replaces engines, shares GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.profiler import profile

from or1_megatron.checkpoint.loader import load
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.checkpoint.sharded_state import restart_optimizer
from or1_megatron.config.schema import Config, HandoffConfig
from or1_megatron.handoff.failures import EngineStrayed, HandoffMismatch, PolicyNotFinite, SendError
from or1_megatron.handoff.probe import Probe, ProbeResult
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.interfaces import Objective
from or1_megatron.parallel.lockstep import Lockstep, Verb
from or1_megatron.parallel.policy import MegatronPolicy, export_hf, unpack_scores
from or1_megatron.parallel.replicas import check_replicas
from or1_megatron.parallel.router_replay import bring_experts
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rollout.client import RolloutsClient
from or1_megatron.rollout.engine_group import EngineError, EngineGroup
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.types import Batch, Float32Array, HandoffReport, MicroBatch, Sample, TokenScores, UpdateReport

log = logging.getLogger(__name__)

_PROBE_EVERY_STEPS_ON_GPU = 10

Devices = Literal["trainer", "handoff", "engines", "neither"]
"""Who has the GPUs that trainer and engines share."""

TRANSITIONS: Final[Mapping[Devices, tuple[Devices, ...]]] = {
    "trainer": ("handoff", "neither"),
    "handoff": ("engines", "neither"),
    "engines": ("trainer", "neither"),
    "neither": ("trainer", "handoff"),
}
"""For each state of the shared GPUs, the states that may follow."""


@dataclass(frozen=True)
class DeviceSharing:
    """What trainer and engines do to share their GPUs."""

    engines_sleep: bool
    """Whether the engines sleep while the trainer uses the GPUs."""
    trainer_offloads: bool
    """Whether the trainer's state is in host memory while the engines sample."""


def rank_verbs(
    policy: MegatronPolicy,
    saver: CheckpointSaver,
    sender: WeightSender | None = None,
    score_reference: Verb | None = None,
    config: Config | None = None,
) -> dict[str, Verb]:
    """Return, by name, the functions that this rank runs when rank 0 calls them on all ranks (``Lockstep``).

    Args:
        sender: sends this rank's weights in a handoff; None: there are no engines.
        score_reference: scores this rank's rows by the frozen reference; None: there is no reference.
        config: says which steps to profile and where the run's folder is; None: no step is profiled.
    """

    def of_rows(method: Verb) -> Verb:
        """Return a verb that calls ``method`` on rows with this rank's recorded expert indices, if there are any."""

        def verb(rows: Sequence[MicroBatch], routed: bool, *arguments: Any) -> Any:
            if routed:
                own = bring_experts(policy.mesh, policy.parts, policy.whole_batch)
                policy.whole_batch = None
                rows = [replace(row, own_experts=experts) for row, experts in zip(rows, own, strict=True)]
            return method(rows, *arguments)

        return verb

    verbs: dict[str, Verb] = {
        "score": of_rows(policy.score),
        "update": of_rows(policy.update_and_score),
        "restart_optimizer": partial(restart_optimizer, policy),
        "check_replicas": partial(check_replicas, policy),
        "offload": policy.host.offload,
        "restore": policy.host.restore,
        "save": saver.save,
        "load": partial(load, policy),
        "export_hf": partial(export_hf, policy),
    }
    if sender is not None:
        send = sender.send if config is None else _profiled(sender.send, config, policy.mesh.rank)
        verbs |= {"send": send, "leave_engines": sender.close}
    return verbs if score_reference is None else {**verbs, "score_reference": of_rows(score_reference)}


def _profiled(send: Verb, config: Config, rank: int) -> Verb:
    """Return ``send`` with profiling. The profile of a step in ``profile_steps`` begins when the send before the step
    has returned, and ends when the step's own send has returned."""
    running: list[profile] = []

    def profiled(version: int) -> int:
        sent: int = send(version)
        while running:
            running[0].stop()
            running.pop().export_chrome_trace(f"{config.run.folder}/logs/profile_{version:06}_rank_{rank}.json.gz")
        if version + 1 in config.track.profile_steps:
            running.append(profile())
            running[0].start()
        return sent

    return profiled


class SyncedPolicy:
    """Implements ``interfaces.Policy``: calls all ranks, hands off weights, probes, and tracks who has the shared GPUs.

    state     on the GPUs                                     next state (``TRANSITIONS``)
    trainer   all of the trainer's state; engines sleep       handoff or neither
    handoff   the trainer's parameters, the engines' weights  engines or neither
    engines   the engines; the trainer's state: on the host   trainer or neither
    neither   nothing: a lost engine was replaced             trainer or handoff

    A rollout step goes from engines to trainer, handoff and engines again. Where no engine sleeps (CPU, placement
    ``separate``) and the trainer does not offload, the states change in the same way, but nothing is moved.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        saver: CheckpointSaver,
        pool: EnginePool,
        engines: EngineGroup,
        rollouts: RolloutsClient,
        config: HandoffConfig,
        probe: Probe,
        layout: BatchLayout,
        sharing: DeviceSharing,
    ) -> None:
        """
        Args:
            lockstep: calls the functions of ``rank_verbs`` on all ranks.
            engines: controls the engines of ``pool``.
            layout: the limits of packed rows, for the probe's batch.
            sharing: how the GPUs are shared. The trainer must have the GPUs now, and engines that sleep must be asleep.
        """
        self._lockstep, self._saver = lockstep, saver
        self._pool, self._engines, self._rollouts = pool, engines, rollouts
        self._known = list(pool.handles)  # handles that the RolloutManager has
        self._sharing = sharing
        self._devices: Devices = "trainer"
        self._optimizer_restarts = False
        self._version = 0
        self._handoffs = 0
        self._probe = probe
        self._probe_batch = pack([scored_whole(ids) for ids in probe.token_ids], layout)
        every = config.probe_every_steps
        if every is None:
            every = _PROBE_EVERY_STEPS_ON_GPU if torch.cuda.is_available() else 1
        self._probe_every = every

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        return self._scored("score", batch, temperature)

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        return self._scored("score_reference", batch, temperature)

    def _scored(self, verb: str, batch: Batch, temperature: float) -> TokenScores:
        self.take_devices()
        scored = self._call(verb, batch, temperature)
        return unpack_scores(batch.ranks, scored, batch.sample_count)

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        self.take_devices()
        report: UpdateReport
        report, scored = self._call("update", batch, objective, batch.token_count)
        return replace(report, scores=unpack_scores(batch.ranks, scored, batch.sample_count))

    def _call(self, verb: str, batch: Batch, *arguments: Any) -> Any:
        routed = any(row.routed_experts is not None for rows in batch.ranks for row in rows)
        if not routed:
            return self._lockstep.call(verb, False, *arguments, per_replica=batch.ranks)
        self._saver.policy.whole_batch = batch
        rows = [[replace(row, routed_experts=None) for row in rows] for rows in batch.ranks]
        return self._lockstep.call(verb, True, *arguments, per_replica=rows)

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

    def restart_optimizer(self) -> None:
        """Restart the optimizer when the trainer next takes the GPUs, because the engines may have them now."""
        self._optimizer_restarts = True

    def hand_off(self, version: int) -> HandoffReport:
        """Compare the data-parallel replicas, send the weights to the engines as ``version``, and at every n-th handoff
        compare the log-probs of engines and policy on the probe.

        Engines serve the new weights only when all this has succeeded. An engine that dies meanwhile is replaced, and
        then sending and probe are repeated; requests in flight wait.

        Raises:
            SendError: an engine failed, was too slow, or received or holds other bytes than were sent.
            ReplicasDiffer: a parameter differs between data-parallel ranks.
            PolicyNotFinite: the policy's log-probs are not finite.
            HandoffMismatch: an engine's log-probs differ from the policy's at the first handoff.
            EngineStrayed: an engine's log-probs differ from the policy's at a later handoff.
            EngineError: an engine died too often.
        """
        started_s = time.perf_counter()
        due = self._probe_every and self._handoffs % self._probe_every == 0
        expected = self.score(self._probe_batch, 1.0).log_probs if due else None
        if expected is not None and not all(np.isfinite(log_probs).all() for log_probs in expected):
            raise PolicyNotFinite(version)
        self.take_devices()
        scored_s = time.perf_counter()
        if self._sharing.trainer_offloads:
            self._lockstep.call("offload", "optimizer", "gradients")
        self._pass_devices("handoff")
        self._lockstep.call("check_replicas", version)
        while True:
            try:
                if self._sharing.engines_sleep:
                    self._engines.wake_up(["weights"])
                bytes_sent = self._lockstep.call("send", version)
                self._give_devices()
                sent_s = time.perf_counter()
                probed = None if expected is None else self._judge_engines(expected)
                self._engines.resume_generation(version)
                break
            except (SendError, EngineError) as error:
                if not self._restart_lost():
                    raise
                log.warning("the handoff is done again: %s", error)
                self._lockstep.call("restore", "parameters")
                self._pass_devices("handoff")
        if self._known != self._pool.handles:
            self._rollouts.engines_restarted(self._pool.handles)
            self._known = list(self._pool.handles)
        self._version = version
        self._handoffs += 1
        return HandoffReport(
            version=version,
            bytes_sent=bytes_sent,
            transfer_s=sent_s - scored_s,
            probe_s=time.perf_counter() - sent_s + scored_s - started_s,
            probe_max_abs_diff=None if probed is None else probed.largest,
            probe_mean_abs_diff=None if probed is None else probed.mean,
        )

    def _judge_engines(self, expected: Sequence[Float32Array]) -> ProbeResult:
        """Compare the engines' log-probs on the probe with ``expected``, the policy's log-probs."""
        try:
            return self._probe.judge(self._engines.score_prompts(self._probe.token_ids), expected)
        except HandoffMismatch as error:
            if self._handoffs == 0:  # a restart would not help
                raise
            raise EngineStrayed(str(error)) from error

    def restart_lost_engines(self) -> None:
        """Replace engines that died in the middle of a rollout, and hand the current weights to all engines.

        Where engines share the trainer's GPUs, no engine may be decoding. Raises the same errors as ``hand_off``.
        """
        if self._restart_lost():
            self.hand_off(self._version)

    def take_devices(self) -> None:
        """Put the engines to sleep if they share the trainer's GPUs, and bring the trainer's state back to the GPUs.

        An engine that has died since the rollout is replaced. Raises EngineError if an engine died too often.
        """
        if self._devices == "engines" and self._sharing.engines_sleep:
            try:
                self._engines.sleep()
            except EngineError as error:
                if not self._restart_lost():
                    raise
                log.warning("an engine was lost before the trainer took the devices: %s", error)
        if self._devices != "trainer":
            if self._sharing.trainer_offloads or self._sharing.engines_sleep:
                self._lockstep.call("restore", "parameters", "gradients", "optimizer")
            self._pass_devices("trainer")
        if self._optimizer_restarts:
            self._lockstep.call("restart_optimizer")
            self._optimizer_restarts = False

    def _give_devices(self) -> None:
        """Offload the trainer's parameters, and let the engines decode."""
        if self._sharing.trainer_offloads:
            self._lockstep.call("offload", "parameters")
        if self._sharing.engines_sleep:
            self._engines.wake_up(["kv_cache"])
        self._pass_devices("engines")

    def _pass_devices(self, to: Devices) -> None:
        """Record who has the GPUs now. Raises RuntimeError for a change that ``TRANSITIONS`` does not allow."""
        if to not in TRANSITIONS[self._devices]:
            expected = " or ".join(TRANSITIONS[self._devices])
            raise RuntimeError(f"the devices went from '{self._devices}' to '{to}'; expected {expected}")
        self._devices = to

    def _restart_lost(self) -> bool:
        """Replace lost engines, and return whether an engine was lost. The next handoff connects to the new engines."""
        if not self._pool.restart_lost_engines(self._make_room):
            return False
        self._lockstep.call("leave_engines")
        if self._sharing.engines_sleep:
            self._engines.sleep()  # new engines are awake, and others may be
        self._pass_devices("neither")
        return True

    def _make_room(self) -> None:
        """Offload the trainer's state if engines share its GPUs, because a starting engine needs the memory."""
        if self._sharing.engines_sleep:
            self._lockstep.call("offload", "optimizer", "gradients", "parameters")


def scored_whole(token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> Sample:
    """Return a sample in which every token of the sequence except the first is scored."""
    rest = token_ids[1:]
    return Sample(
        prompt_ids=token_ids[:1],
        response_ids=rest,
        advantage=0.0,
        loss_mask=np.ones(rest.size, dtype=np.bool_),
    )
