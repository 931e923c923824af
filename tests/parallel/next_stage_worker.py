"""test_next_stage's run: ``next_stage_worker.py OUT MODEL LAYOUT PART``; parts: ``first``, ``second``.

``first``: both stages in one go, and stage 1 in a run of its own. ``second``: stage 2 from that run's checkpoint; and
once more with an optimizer and a controller that begin afresh.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_worker import STAGES, Run

from or1_megatron.parallel.mesh import start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.sharded_state import local_shards, optimizer_step
from or1_megatron.rl.ports import Begin


def parts(policy: MegatronPolicy) -> dict[str, Any]:
    """Return digests of all parts of parameters and moments by place in the whole model, and step counts.

    At layouts without data or tensor parallelism each lies whole on one rank, so that they can be compared.
    """
    mine = {
        f"{part.key} {part.offset}": hashlib.sha256(part.of(shard.tensor()).numpy().tobytes()).hexdigest()
        for shard in local_shards(policy)
        for part in shard.slices
    }
    everyone: list[dict[str, str]] = [{} for _ in range(policy.mesh.world)]
    dist.all_gather_object(everyone, mine)
    merged = {place: digest for each in everyone for place, digest in each.items()}
    return {"digests": merged, "sgd_steps": policy.sgd_steps, "adam_steps": optimizer_step(policy)}


class Begun(Run):
    """Notes what it holds as its first step begins, and again before its first update."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        self.seen: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        started = self.diary.verb_started

        def watch(step: int, verb: str) -> None:
            if verb == "begin_stage" and self._state is None:
                self._state = self.loop.state()
            started(step, verb)

        self.diary.verb_started = watch  # type: ignore[method-assign]
        update = self._lockstep._verbs["update"]

        def noting(*args: Any) -> Any:
            if not self.seen:
                self.seen = parts(self.policy)
            return update(*args)

        self._lockstep._verbs["update"] = noting  # type: ignore[index]

    def told(self) -> dict[str, Any] | None:
        ended = self.to_the_end()
        return {"begins": self._state, "before_update": self.seen, "end": ended, "parts": parts(self.policy)}


def main() -> None:
    out, model, layout, part = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    start_process_group(60)
    scratch = out.parent
    told: dict[str, Any] = {}

    def start(name: str, stages: Any = STAGES, **changes: Any) -> None:
        run = Begun(model, layout, scratch / name, scratch / "rollouts.pickle", 1, stages, **changes)
        told[name] = run.told()

    if part == "first":
        start("whole")
        start("stage_1", stage_count=1)
    else:
        begin: Mapping[str, Any] = {
            "begin": Begin(scratch / "stage_1" / "checkpoints" / "step_000003", 1, chosen=False),
            "stage_count": 2,
        }
        start("stage_2", **begin)
        afresh = STAGES[1].model_copy(update={"restart_optimizer": True, "restart_controller": True})
        start("afresh", (STAGES[0], afresh), **begin)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(told))
    stop_process_group()


if __name__ == "__main__":
    main()
