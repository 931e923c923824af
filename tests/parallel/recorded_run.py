"""A whole loop on the Megatron policy with recorded rollouts: the first run records them to a file, others read it."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fakes import SAMPLED, Clock, Diary, RiddleStream, TableRollouts, asked_by
from megatron.core import parallel_state

from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.checkpoint.sharded_state import local_shards
from or1_megatron.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    EntropyConfig,
    EvaluationConfig,
    HandoffConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    StageConfig,
)
from or1_megatron.handoff.probe import Probe
from or1_megatron.interfaces import Stopped
from or1_megatron.parallel.lockstep import Lockstep
from or1_megatron.parallel.mesh import Mesh, build_mesh
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.rl.loop import Loop
from or1_megatron.rl.loop_arguments import LoopConfig, Ports
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.runtime.seeds import seed_everything
from or1_megatron.runtime.timers import StepTimer
from or1_megatron.trainer.synced_policy import DeviceSharing, SyncedPolicy, rank_verbs
from or1_megatron.types import Group, HandoffReport, Prompt, RolloutReport, Sampling

PROBLEMS = 12
SHORT = StageConfig(
    name="short", steps=3, max_response_tokens=6, prompts_per_step=6, prompts_per_update=6, group_size=8
)
STAGES = (SHORT, SHORT.model_copy(update={"name": "long", "max_response_tokens": 9, "prompts_per_update": 3}))


class RecordedRollouts(TableRollouts):
    """Rollouts from a file, which is recorded if it does not exist yet. Recorded rollouts do not follow the policy."""

    def __init__(self, file: Path) -> None:
        super().__init__(Clock())
        self.table = np.zeros((SAMPLED + PROBLEMS, SAMPLED))
        self._file = file
        self._records = not file.exists()
        self._known: dict[int, list[Group]] = {} if self._records else pickle.loads(file.read_bytes())

    def roll_out(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *_: Any) -> int:
        if self._records:
            ticket = super().roll_out(prompts, group_size, sampling, seed)
            self._known[seed] = self.under_way.pop(ticket)
            self._file.write_bytes(pickle.dumps(self._known))
        self.calls += not self._records
        groups = self._known[seed]
        assert [group.prompt.problem.id for group in groups] == [prompt.problem.id for prompt in prompts]
        self.under_way[self.calls] = groups
        self.asked[self.calls] = asked_by(prompts, group_size, sampling, seed)
        return self.calls

    def collect(self, ticket: int | None = None) -> tuple[list[Group], RolloutReport]:
        if self.stop_at == self.calls:
            raise Stopped
        return super().collect(ticket)


class LocalPolicy(SyncedPolicy):
    """A policy without engines: a handoff only sets the version."""

    def __init__(self, lockstep: Lockstep, saver: CheckpointSaver, rollouts: Any) -> None:
        nobody: Any = SimpleNamespace(handles=[])
        config, layout, sharing = HandoffConfig(), BatchLayout(1, 64, 1), DeviceSharing(False, False)
        probe = Probe(config, "float32", 61, 8)
        super().__init__(lockstep, saver, nobody, nobody, rollouts, config, probe, layout, sharing)

    def hand_off(self, version: int) -> HandoffReport:
        self._rollouts.version = version  # type: ignore[attr-defined]
        return HandoffReport(version, 0, 0.0, 0.0, None, None)


class Run:
    """One start of the run in ``folder``, on this rank."""

    def __init__(
        self,
        model: Path,
        layout: Mapping[str, Any],
        folder: Path,
        rollouts: Path,
        seed: int,
        stages: Sequence[StageConfig] = STAGES,
        every_steps: int = 1,
        **changes: Any,
    ) -> None:
        """``every_steps``: number of steps between checkpoints. ``changes``: fields of the LoopConfig."""
        parallel_state.destroy_model_parallel()
        parallel = ParallelConfig(**layout)
        self.mesh: Mesh = build_mesh(parallel, seed=seed)
        seed_everything(seed, self.mesh.rank)  # a different seed at each start: the generators come from the checkpoint
        config = OptimizerConfig(lr=1e-2, warmup_steps=4)
        self.policy = MegatronPolicy(ModelConfig(hf=model, dtype="float32"), parallel, config, self.mesh)
        self.saver = CheckpointSaver(self.policy)
        verbs = rank_verbs(self.policy, self.saver)
        heart = Heartbeat(folder / "beats", f"rank {self.mesh.rank}")
        self._lockstep = Lockstep(self.mesh, verbs, 600.0, heart)
        self.rollouts, self.diary = RecordedRollouts(rollouts), Diary()
        self.loop = Loop(
            LoopConfig(
                seed=5,
                stages=tuple(stages),
                algorithm=AlgorithmConfig(entropy=EntropyConfig(target=5.0, delta=0.01)),
                evaluation=EvaluationConfig(),
                checkpoint=CheckpointConfig(every_steps=every_steps, keep_last=10),
                layout=BatchLayout(self.mesh.data, budget_tokens=64, alignment=4),
                max_error_fraction=0.05,
                export_folder=folder / "hf",
                **changes,
            ),
            Ports(
                policy=LocalPolicy(self._lockstep, self.saver, self.rollouts),
                rollouts=self.rollouts,
                stream=RiddleStream(PROBLEMS),
                evaluator=None,
                observer=self.diary,
                tracker=self.diary,
                keeper=CheckpointKeeper(folder / "checkpoints", keep_last=10, keep_best=True),
                timer=StepTimer(),
                stop=lambda: False,
            ),
        )

    def to_the_end(self) -> dict[str, Any] | None:
        """Run to the end; return metrics and the loop's state, without times, and a digest of each rank's state."""
        if self.mesh.rank == 0:
            self.loop.run()
            self._lockstep.close()
        else:
            self._lockstep.serve()
        self.saver.close()
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for shard in local_shards(self.policy):
            digest.update(shard.tensor().numpy().tobytes())
        digests: list[str] = [""] * self.mesh.world
        dist.all_gather_object(digests, digest.hexdigest())
        timed = ("time/", "checkpoint/write_s", "other_share", "engine/", "train/")
        rows = {s: {k: v for k, v in row.items() if not k.startswith(timed)} for s, row in self.diary.rows.items()}
        state = {name: value for name, value in self.state().items() if name != "seconds"}
        return {"rows": rows, "state": state, "digests": digests, "steps": self.policy.sgd_steps}

    def state(self) -> dict[str, Any]:
        """Return the loop's state as a checkpoint holds it: without tuples."""
        state: dict[str, Any] = json.loads(json.dumps(self.loop.state()))
        return state
