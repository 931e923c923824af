"""The loop's side of checkpoints: the state that a stop saves, and saves that are written while training goes on.

Between two checkpoints on disk there is one in memory after each step. A step that ends while an earlier checkpoint is
still being written gets none.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.interfaces import Policy, Rollouts

if TYPE_CHECKING:
    from or1_megatron.checkpoint.keeper import CheckpointKeeper

logger = logging.getLogger(__name__)


class Saving:
    """Saves ``snapshot`` as checkpoints, one at a time, and tells the keeper when each is complete."""

    def __init__(self, policy: Policy, keeper: CheckpointKeeper, rollouts: Rollouts, in_memory: bool = False) -> None:
        """
        Args:
            rollouts: a checkpoint keeps their finished responses.
            in_memory: write checkpoints to ``keeper.memory``, too.
        """
        self._policy, self._keeper, self._rollouts = policy, keeper, rollouts
        self._memory = keeper.memory if in_memory else None
        self.snapshot: Mapping[str, Any] = {}
        """The loop's state after its last complete step."""
        self.saved_at: int | None = None
        """The step of the newest checkpoint on disk, complete or still being written."""
        self._writing: tuple[CheckpointKeeper, int, bool] | None = None  # (its keeper, step, best)
        self._write_s: float | None = None  # of the last one written, until it has been reported

    def resumed(self, checkpoint: Path, step: int) -> None:
        """Learn from which checkpoint the run goes on."""
        self.saved_at = step if checkpoint.parent == self._keeper.folder else None

    def write(self, step: int, best: bool) -> None:
        """Save the snapshot, which is of ``step``, on disk, unless it is saved there already."""
        if self.saved_at != step:
            self.finish(wait=True)
            self._policy.save(self._keeper.folder_for(step), self.snapshot, self._rollouts.finished_responses())
            self.saved_at = step
            self._writing = (self._keeper, step, best)
        elif best:
            self.finish(wait=True)
            self._keeper.saved(step, best)

    def write_in_memory(self, step: int) -> None:
        """Save the snapshot, which is of ``step``, in memory, where the run does so and nothing is being written."""
        if self._memory is None or self._writing is not None:
            return
        try:
            self._policy.save(self._memory.folder_for(step), self.snapshot, self._rollouts.finished_responses())
            self._writing = (self._memory, step, False)
        except AgreedError as error:
            if isinstance(error, PartLost):
                raise
            self._leave_memory(error)

    def finish(self, wait: bool) -> None:
        """If the checkpoint that is being written is complete, tell the keeper, which may then drop older ones."""
        if self._writing is None:
            return
        keeper, step, best = self._writing
        try:
            write_s = self._policy.finish_save(wait)
        except AgreedError as error:
            self._writing = None
            if keeper is not self._memory:
                raise
            self._leave_memory(error)
            return
        if write_s is not None:
            if keeper is self._keeper:
                self._write_s = write_s
            keeper.saved(step, best)
            self._writing = None

    def _leave_memory(self, error: AgreedError) -> None:
        """Go on without checkpoints in memory: those on disk are what a run needs."""
        logger.warning("no more checkpoints in memory: %s", error)
        if self._memory is not None:
            shutil.rmtree(self._memory.folder, ignore_errors=True)
        self._memory = None

    def take_write_s(self) -> dict[str, float]:
        """Return ``checkpoint/write_s`` of the last checkpoint written, once."""
        write_s, self._write_s = self._write_s, None
        return {} if write_s is None else {"checkpoint/write_s": write_s}
